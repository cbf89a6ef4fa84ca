// The normalised Walsh-Hadamard transform of each BLOCK neighbours of a row, in place. A workgroup a block. SIGNS: 1 before, 2 after it,
// 0 none. ROWS: of the rows that need logits, else of tokens. Strides up to a tile's are taken in workgroup memory.
struct Args { width: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> signs: array<f32>;
@group(0) @binding(2) var<storage, read_write> rows: array<f32>;
@group(0) @binding(3) var<uniform> args: Args;
const TILE = min(BLOCK, 2048);
var<workgroup> tile: array<f32, TILE>;

// The first member of pair i at a distance of `stride`.
fn low_of(i: i32, stride: i32) -> i32 { return 2 * i - (i & (stride - 1)); }

@compute @workgroup_size(WG)
fn hadamard(grid: Grid, g: Group) {
    let row = i32(grid.id.y);
    let lane = i32(g.lane);
    if (row >= step[select(STEP_TOKENS, STEP_ROWS, ROWS != 0)]) { return; }
    let first = i32(grid.id.x) * BLOCK;
    let block = row * args.width + first;
    for (var start = 0; start < BLOCK; start += TILE) {
        for (var i = lane; i < TILE; i += WG) {
            tile[i] = rows[block + start + i];
            if (SIGNS == 1) { tile[i] *= signs[first + start + i]; }
        }
        for (var stride = 1; stride < TILE; stride *= 2) {
            workgroupBarrier();
            for (var i = lane; i < TILE / 2; i += WG) {
                let low = low_of(i, stride);
                let a = tile[low];
                let b = tile[low + stride];
                tile[low] = a + b;
                tile[low + stride] = a - b;
            }
        }
        for (var i = lane; i < TILE; i += WG) { rows[block + start + i] = tile[i]; }  // those that it has just written
    }
    for (var stride = TILE; stride < BLOCK; stride *= 2) {
        storageBarrier();
        for (var i = lane; i < BLOCK / 2; i += WG) {
            let low = block + low_of(i, stride);
            let a = rows[low];
            let b = rows[low + stride];
            rows[low] = a + b;
            rows[low + stride] = a - b;
        }
    }
    let unit = 1.0 / sqrt(f32(BLOCK));
    for (var i = lane; i < BLOCK; i += WG) {
        rows[block + i] *= unit;
        if (SIGNS == 2) { rows[block + i] *= signs[first + i]; }
    }
}
