"""Metal's kernels of mixtures of experts, run on the CPU by the shim, against float64. Outputs are poisoned before."""

from __future__ import annotations

import numpy as np
import pytest
from metal_steps import OWN, Array, Steps, packed, poisoned, run

from bitnet.core.testing import oracle, oracle_experts
from bitnet.core.testing.oracle_experts import Matrices

WG = 64
TILE = 8

pytestmark = pytest.mark.nightly(unless_changed=OWN)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("experts", "top", "dim", "lanes"), [(1, 1, 4, 16), (70, 6, 132, 16), (256, 8, 260, 8)])
def test_route(rng: np.random.Generator, experts: int, top: int, dim: int, lanes: int) -> None:
    """Half of the experts have the row of another, whose logit equals theirs to the bit."""
    tokens = 3
    step = Steps(rng, [(tokens, tokens)])
    x, weight = rng.standard_normal((tokens + 1, dim)).astype(np.float32) * 3, rng.random(dim, np.float32) + 0.5
    router = rng.standard_normal((experts, dim)).astype(np.float32)
    router[rng.permutation(experts)[: experts // 2]] = router[0]
    logits = poisoned((tokens + 1, experts))
    constants = {"WG": WG, "LANES": lanes, "EXPERTS": experts}
    grid, arguments = (-(-experts * lanes // WG), tokens + 1), (step.words, x, weight, 1e-5, router, logits)
    run("route", constants, grid, WG, *arguments, dim, experts, kernel="route_logits")
    exact, bound = oracle_experts.route(x[:tokens], weight, 1e-5, router)
    assert (abs(logits[:tokens] - exact) <= bound).all()
    same = (router == router[0]).all(axis=1)
    assert (logits[:tokens, same] == logits[:tokens, :1]).all()
    assert np.isnan(logits[tokens]).all()
    ids, shares = poisoned((tokens + 1, top), np.int32), poisoned((tokens + 1, top))
    run("route", constants, (tokens + 1,), WG, step.words, logits, ids, shares, top, kernel="route_top")
    assert (ids[:tokens] == np.argsort(-logits[:tokens], axis=1, kind="stable")[:, :top]).all()
    wanted = oracle_experts.shares(logits[:tokens].astype(np.float64), ids[:tokens])
    assert (abs(shares[:tokens] - wanted) <= wanted * 2e-6).all()
    assert (ids[tokens] == -1).all()
    assert np.isnan(shares[tokens]).all()


@pytest.mark.parametrize("relu2", [0, 1])
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("limit", [0.5, 7.0, np.inf])
def test_expert_glu(rng: np.random.Generator, relu2: int, norm: int, limit: float) -> None:
    tokens, top, dim = 2, 3, 132
    step, rows = Steps(rng, [(tokens, tokens)]), tokens * top
    x, weight = rng.standard_normal((rows + top, 2 * dim)).astype(np.float32) * 4, rng.random(dim, np.float32) + 0.5
    out, scale = poisoned((rows + top, dim), np.int8), poisoned((rows + top,))
    arguments = (step.words, x, weight if norm else x, 1e-6, out, scale, dim, limit)
    run("expert_glu", {"WG": WG, "NORM": norm, "RELU2": relu2}, (top, tokens + 1), WG, *arguments)
    limited = np.concatenate([np.minimum(x[:rows, :dim], limit), np.clip(x[:rows, dim:], -limit, limit)], axis=1)
    y = oracle.glu(limited, "relu2" if relu2 else "silu")
    wanted = oracle.absmax(oracle.rms_norm(y, weight, 1e-6) if norm else y)
    assert abs(scale[:rows] / wanted.scale - 1).max() <= 1e-5
    assert abs(out[:rows] - wanted.quotient).max() <= 0.5 + 2e-3
    assert (out[rows:] == -1).all()
    assert np.isnan(scale[rows:]).all()


def tiles_of(rng: np.random.Generator, ids: Array, experts: int) -> tuple[Array, Array]:
    """The pairs of a step in tiles, as the kernel groups them; checked."""
    tokens, top = ids.shape
    step, pairs = Steps(rng, [(tokens, tokens)]), ids.size
    count = pairs // TILE + min(pairs, experts) + 2
    order, tiles = poisoned((pairs + 1,), np.int32), poisoned((count + 1, 3), np.int32)
    constants = {"WG": WG, "EXPERTS": experts, "TOKENS": TILE}
    run("expert_tiles", constants, (1,), WG, step.words, ids, order, tiles, top, count)
    assert sorted(order[:pairs]) == [*range(pairs)]
    assert order[pairs] == -1
    assert (tiles[count] == -1).all()
    used, found = tiles[:count][tiles[:count, 2] > 0], ids.reshape(-1)[order[:pairs]]
    assert (tiles[: len(used), 2] > 0).all()
    assert (tiles[len(used) : count, 2] == 0).all()
    for e in range(experts):
        of_expert = used[used[:, 0] == e]
        assert (of_expert[:-1, 2] == TILE).all()
        assert sum(of_expert[:, 2]) == (ids == e).sum()
        assert all((found[begin : begin + n] == e).all() for _, begin, n in of_expert)
    return order, tiles


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top", "rows", "parts", "cols", "group", "lanes"),
    [
        (3, 9, 2, 20, 2, 192, 32, 16),
        (19, 12, 3, 33, 1, 640, 64, 8),
        (5, 40, 2, 70, 2, 516, 516, 16),
        (9, 7, 7, 5, 1, 132, 0, 16),
    ],
)
def test_expert_matmul(
    rng: np.random.Generator,
    tokens: int,
    experts: int,
    top: int,
    rows: int,
    parts: int,
    cols: int,
    group: int,
    lanes: int,
    grouped: bool,
    several: bool,
) -> None:
    """Pairs alone and in tiles, of one row a token and of a row each; the results of another matrix are kept."""
    spare = int(top < experts)  # the first expert has no rows then
    ids = np.stack([rng.permutation(experts - spare)[:top] + spare for _ in range(tokens)]).astype(np.int32)
    step, per, pairs = Steps(rng, [(tokens, tokens)]), 1 if several else top, tokens * top
    x = rng.integers(-128, 128, (pairs // per + 1, cols), np.int8)
    scale = rng.random(pairs // per + 1, np.float32)
    stacked = rng.integers(-1, 2, (parts, experts, rows, cols), np.int8)
    units = rng.random((parts, experts, rows, cols // (group or cols)), np.float32).astype(np.float16)
    held = [Matrices(stacked[p], units[p] if group else float(units[0, 0, 0, 0])) for p in range(parts)]
    factors = units if group else np.full((parts, experts, rows), units[0, 0, 0, 0], np.float32)
    codes, first = packed(stacked.reshape(-1, cols)), 4
    columns = first + parts * rows + 3
    out = poisoned((pairs + 1, columns))
    order, tiles = tiles_of(rng, ids, experts) if grouped else (step.words, step.words)
    constants = {"WG": WG, "LANES": lanes, "TOKENS": TILE if grouped else 1, "COLS": cols, "GROUP": group or cols}
    constants |= {"EACH": {32: 4, 64: 2}.get(group, 1), "ROW_BYTES": codes.shape[1]}
    grid = -(-parts * rows * lanes // WG), len(tiles) - 1 if grouped else pairs + 1
    sizes = top, per, experts, rows, parts, first, columns, int(bool(group)), int(grouped)
    run("expert_matmul", constants, grid, WG, step.words, x, scale, ids, codes, factors, order, tiles, out, *sizes)
    shape = (tokens, top)
    of_pair = np.arange(pairs).reshape(shape) // per
    exact = oracle_experts.products(x[of_pair], scale[of_pair], ids, held).reshape(pairs, -1)
    made = out[:pairs, first : first + parts * rows]
    assert (made.view(np.int32) == exact.view(np.int32)).all()
    out[:pairs, first : first + parts * rows] = np.nan
    assert np.isnan(out).all()


def test_expert_sums(rng: np.random.Generator) -> None:
    tokens, top, columns = 3, 5, 2 * WG + 7
    step = Steps(rng, [(tokens, tokens)])
    parts = rng.standard_normal((tokens + 1, top, columns)).astype(np.float32)
    shares = rng.dirichlet(np.ones(top), tokens + 1).astype(np.float32)
    before = rng.standard_normal((tokens + 1, columns)).astype(np.float32)
    out = before.copy()
    constants = {"WG": WG, "LANES": 16, "TOKENS": 1, "COLS": 128, "GROUP": 128, "EACH": 1, "ROW_BYTES": 32}
    grid, arguments = (-(-columns // WG), tokens + 1), (step.words, parts, shares, out, top, columns)
    run("expert_matmul", constants, grid, WG, *arguments, kernel="expert_sums")
    wanted = oracle_experts.added(before[:tokens], parts[:tokens], shares[:tokens])
    assert (out[:tokens].view(np.int32) == wanted.view(np.int32)).all()
    assert (out[tokens] == before[tokens]).all()
