"""The measurement of a layer's chain, less the GPU: its kernels compile, and its oracle finds each wrong operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import chain_layer
from chain_layer import CLUSTER, CONTEXT, DIM, FFN, GROUP, HEADS, HIDDEN, KV_HEADS, Bytes, Codes, Floats, Layer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_chain.py"
STEPS = HIDDEN // 256
OFFSETS = dict(zip(chain_layer.TRACE, np.cumsum([0, *chain_layer.TRACE.values()]), strict=False))


@pytest.fixture(scope="module")
def layer() -> Layer:
    return chain_layer.random_layer(np.random.default_rng())


def weights_of(units: Bytes) -> Codes:
    """What units stand for, one after the other, each 16 rows by 256 columns; by the description in bench_chain.cuh."""
    found = np.empty((len(units), 16, 256), np.int8)
    for lane in range(32):
        group, quarter = divmod(lane, 4)
        for half in range(2):
            mine = units[:, half * 512 + lane * 16 :][:, :16]
            for plane in range(4):
                columns = slice(plane * 64 + quarter * 16, plane * 64 + quarter * 16 + 16)
                found[:, group + 8 * half, columns] = (mine >> (6 - 2 * plane) & 3).astype(np.int8) - 1
    return found


def rows_of(image: Bytes, at: int, tiles: int, steps: int) -> Codes:
    """The weights of tiles whose units begin at unit ``at`` of a block: [tiles, 16, 256 * steps]."""
    units = image[at * 1024 :][: tiles * steps * 1024].reshape(-1, 1024)
    found: Codes = weights_of(units).reshape(tiles, steps, 16, 256).swapaxes(1, 2).reshape(tiles, 16, -1)
    return found


def test_blocks_of_a_grid_have_whole_rows(layer: Layer) -> None:
    blocks = 132
    images = chain_layer.images(layer, clusters=False, blocks=blocks)
    o, gate, down = 2 * STEPS, 4 * STEPS, 11 * STEPS
    for block in (0, 27, 28, 71, 72, 107, 108, 130, 131):
        for at, tiles, steps, whole in (
            (0, 2, STEPS, layer.qkv),
            (o, 2, STEPS, layer.o),
            (down, 2, FFN // 256, layer.down),
        ):
            found = rows_of(images[block], at, tiles, steps)
            for i, rows in enumerate(found):
                first = (block + i * blocks) * 16
                assert (rows == (whole[first:][:16] if first < len(whole) else 0)).all(), (block, at, i)
        for i, rows in enumerate(rows_of(images[block], gate, 7, STEPS)):
            first = (block + i * blocks) * 8
            for side, whole in ((rows[:8], layer.gate), (rows[8:], layer.up)):
                assert (side == (whole[first:][:8] if first < FFN else 0)).all(), (block, i)
    span, keys = -(-CONTEXT // 26), (11 * STEPS + 2 * (FFN // 256)) * 1024
    last = images[25 * 1 + 26 * 3]  # key/value head 3's last share
    rows = last[keys:][: span * 288].view(np.float16).reshape(span, -1)[:, :DIM]
    np.testing.assert_array_equal(rows[: CONTEXT - 25 * span], layer.keys[3, 25 * span :])


def test_clusters_have_a_head_and_a_part_of_k(layer: Layer) -> None:
    for blocks in (96, 112, 128):
        images = chain_layer.images(layer, clusters=True, blocks=blocks)
        tiles = -(-FFN // 8 // blocks)
        width, steps = 8 * tiles * CLUSTER, -(-8 * tiles * CLUSTER // 256)
        o, gate = 3 * STEPS, 3 * STEPS + 20
        down = gate + tiles * STEPS
        for block in (0, 15, 16, 79, 80, blocks - 1):
            cluster, rank = divmod(block, CLUSTER)
            columns = layer.down[160 * rank :][:160, cluster * width :][:, :width]
            found = rows_of(images[block], down, 10, steps).reshape(160, -1)
            assert (found[:, : columns.shape[1]] == columns).all()
            assert not found[:, columns.shape[1] :].any()
            gates = rows_of(images[block], gate, tiles, STEPS)
            ups = layer.up[block * 8 * tiles :][: 8 * tiles]
            assert (gates[:, 8:].reshape(-1, HIDDEN)[: len(ups)] == ups).all()
            if cluster >= KV_HEADS:
                continue
            qkv = rows_of(images[block], 0, 3, STEPS).reshape(6, 8, HIDDEN)
            heads = [cluster * GROUP + i for i in range(GROUP)] + [HEADS + cluster, HEADS + KV_HEADS + cluster]
            for slot, head in enumerate(heads):
                for e in range(8):
                    assert (qkv[slot, e] == layer.qkv[head * DIM + 4 * rank + e % 4 + e // 4 * 64]).all()
            part = layer.o[160 * rank :][:160, cluster * GROUP * DIM :][:, : GROUP * DIM]
            assert (rows_of(images[block], o, 10, 2).reshape(160, -1) == part).all()
            keys = images[block, (down + 10 * steps) * 1024 :][: 32 * 288].view(np.float16).reshape(32, -1)
            np.testing.assert_array_equal(keys[:, :DIM], layer.keys[cluster, 32 * rank :][:32])


def computed(layer: Layer, layers: int) -> tuple[Floats, Floats]:
    """A trace as a right kernel leaves it, and the residual behind its last layer; in float64 between roundings."""
    trace = np.zeros((layers, chain_layer.TRACE_WORDS), np.float32)
    x = layer.first

    def norm_quant(values: Floats, at: int, row: Floats, which: int) -> Codes:
        exact = values.astype(np.float64)
        y = exact / np.sqrt(np.mean(exact**2) + 1e-5) * layer.gains[at:][: len(values)]
        scale = max(np.abs(y).max(), 1e-5) / 127
        row[OFFSETS["scales"] + which] = scale
        codes: Codes = np.rint(y / scale).astype(np.int8)
        row[OFFSETS["scales"] + 4 :].view(np.int8)[which * HIDDEN :][: len(values)] = codes
        return codes

    def product(codes: Codes, weights: Codes, row: Floats, which: int, unit: int) -> Floats:
        scale = np.float32(row[OFFSETS["scales"] + which] * layer.units[unit])
        sums: Floats = (weights.astype(np.float64) @ codes).astype(np.float32)
        result: Floats = sums * scale
        return result

    for row in trace:

        def put(name: str, values: Floats, row: Floats = row) -> None:
            row[OFFSETS[name] :][: len(values)] = values

        put("x", x)
        codes = norm_quant(x, 0, row, 0)
        q, k, v = (
            product(codes, w, row, 0, i) for i, w in enumerate(np.split(layer.qkv, [HIDDEN, HIDDEN + KV_HEADS * DIM]))
        )
        turned: list[NDArray[np.float64]] = []
        for half in np.split(np.concatenate([q, k]).astype(np.float64), HEADS + KV_HEADS):
            pairs = (half[:64] + 1j * half[64:]) * (layer.angles[0].astype(np.float64) + 1j * layer.angles[1])
            turned += [pairs.real, pairs.imag]
        put("qkv", np.concatenate([*turned, v]).astype(np.float32))
        q, k = np.split(np.concatenate(turned).astype(np.float32), [HIDDEN])
        attended = []
        for head in range(HEADS):
            kv = head // GROUP
            keys, values = layer.keys[kv].astype(np.float64), layer.values[kv].astype(np.float64)
            keys[-1] = k[kv * DIM :][:DIM].astype(np.float16)
            values[-1] = v[kv * DIM :][:DIM].astype(np.float16)
            each = np.exp(keys @ q[head * DIM :][:DIM].astype(np.float64) / np.sqrt(DIM))
            attended.append(each / each.sum() @ values)
        put("attended", np.concatenate(attended).astype(np.float32))
        codes = norm_quant(row[OFFSETS["attended"] :][:HIDDEN], 2 * HIDDEN, row, 1)
        x = x + product(codes, layer.o, row, 1, 3)
        put("middle", x)
        codes = norm_quant(x, HIDDEN, row, 2)
        gate, up = product(codes, layer.gate, row, 2, 4), product(codes, layer.up, row, 2, 5)
        put("gated", np.maximum(gate, 0) ** 2 * up)
        codes = norm_quant(row[OFFSETS["gated"] :][:FFN], 3 * HIDDEN, row, 3)
        x = x + product(codes, layer.down, row, 3, 6)
    return trace, x


def test_a_right_trace_passes_and_each_wrong_value_is_found(layer: Layer) -> None:
    trace, out = computed(layer, 2)
    chain_layer.check(layer, trace, out)
    rng = np.random.default_rng()
    codes = 4 * (OFFSETS["scales"] + 4)

    def said(wrong: Floats, end: Floats = out) -> str:
        with pytest.raises(ValueError, match="is wrong in") as raised:
            chain_layer.check(layer, wrong, end)
        return str(raised.value)

    for name, count in chain_layer.TRACE.items():
        at, wrong = int(OFFSETS[name] + rng.integers(count)), trace.copy()
        wrong[1, at] += 0.01 * max(1, abs(wrong[1, at]))
        found = said(wrong)
        assert name == "x" or "of layer 1." in found
        wrong[1, at] = np.nan
        said(wrong)
    for row, count in enumerate((HIDDEN, HIDDEN, HIDDEN, FFN)):
        wrong = trace.copy()
        wrong[0].view(np.int8)[codes + row * HIDDEN + rng.integers(count)] ^= 2
        assert "codes" in said(wrong)
    end = out.copy()
    end[rng.integers(HIDDEN)] = 0
    assert "after down" in said(trace, end)


def test_phases_are_of_the_slowest_block_and_waits_of_the_one_that_waits_least() -> None:
    bench_chain = pytest.importorskip("bench_chain", reason="cuda-bindings is not installed")
    schedule = bench_chain.Schedule("grid", 0, ("work", "wait for all blocks"))
    starts = np.array([1000, 1130, 1260])
    stamps = np.stack([np.stack([starts, starts + work], axis=1) for work in (100, 50, 0)])
    stamps[2, :, 1] = 0  # a block without the phase
    work, wait = bench_chain.phase_times(schedule, stamps, 13.0)
    assert work == pytest.approx(10)
    assert wait == pytest.approx(3)


@pytest.mark.parametrize("watch", range(3))
@pytest.mark.parametrize(("name", "blocks"), [("GRID", 132), ("CLUSTERS", 96)])
def test_it_compiles(name: str, blocks: int, watch: int) -> None:
    """For 9.0, where alone it runs; the sources themselves say that a layer fits in the shared memory."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # its loader's own types
        pytest.skip(f"nvidia-cuda-nvrtc is not installed: {error}")
    import bench_chain
    from bitnet.cuda.compiler import compile_source

    schedule = getattr(bench_chain, name)
    assert len(schedule.phases) == bench_chain.STAMPS
    cubin = compile_source(
        bench_chain.source(schedule), "chain", bench_chain.flags(schedule, blocks, watch), "no device"
    )
    assert b".text.chain\0" in cubin


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TOOL), "cuda:0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("bench_chain: error: cuda:0 cannot be used: ")
    assert done.stderr.count("\n") == 1
