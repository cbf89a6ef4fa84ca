"""The suite's oracles, against published numbers and cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.hal import SamplingParams
from bitnet.core.testing import draws, oracle, rig

# philox4x32 with 10 rounds, of the authors' kat_vectors (Random123): counter, key, result.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_philox(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    a, b, c, d = (np.array([word], np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in draws.philox4x32((a, b, c, d), key)) == result


def test_noise_takes_the_lane_of_the_token() -> None:
    """Seed 0 at position -1 + 1 = 0, tokens 0 to 3: the four words of the first published vector."""
    words = np.array(PUBLISHED[0][2])
    expected = -np.log(-np.log(((words >> 9) + 0.5) / 2**23))
    assert np.array_equal(draws.gumbel(6, -1, 0)[:4], expected)


def test_filters_by_hand() -> None:
    z = np.log(np.array([0.1, 0.4, 0.2, 0.3]))

    def kept(**params: float) -> list[int]:
        keep = draws.kept(z, SamplingParams(1.0, **params), 0)  # type: ignore[arg-type]
        return [int(v) for v in np.flatnonzero(keep)]

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.6) == [1, 3]
    assert kept(top_p=0.71) == [1, 2, 3]
    assert kept(top_k=3, top_p=0.44) == [1]  # 0.4 / 0.9
    assert kept(top_k=3, top_p=0.45) == [1, 3]
    assert kept(min_p=0.6) == [1, 3]
    assert kept(min_p=1.0) == [1]


def test_chi_square() -> None:
    rng = np.random.default_rng(5)
    p = np.array([0.02, 0.3, 0.08, 0.25, 0.05, 0.1, 0.2])
    for _ in range(50):
        assert draws.chi_square_is_plausible(rng.multinomial(12_000, p), p)
    off = p + np.array([0, 0.02, 0, -0.02, 0, 0, 0])
    assert not draws.chi_square_is_plausible(rng.multinomial(12_000, off), p)
    # The 0.9999 quantile of chi-square with 6 degrees of freedom is 27.86; the approximation is 2 % off so far out.
    counts = np.array([500.0, 500, 500, 500, 500, 500, 500])
    for statistic, plausible in ((27.5, True), (28.8, False)):
        moved = np.sqrt(statistic * 500 / 2)
        assert (
            draws.chi_square_is_plausible(counts + moved * np.eye(7)[0] - moved * np.eye(7)[1], np.ones(7) / 7)
            is plausible
        )


def test_packing_by_hand() -> None:
    """Weights 0, 32, 64 and 96 of a row share its first byte, the first of them in the high bits."""
    row = np.zeros((1, 130), np.int8)
    row[0, [0, 32, 96, 129]] = [1, -1, 1, -1]
    codes = rig.ternary(row, 1.0).load().codes
    assert codes.shape == (1, 64)
    assert codes[0, 0] == 0b10_00_01_10
    assert codes[0, 1] == 0b01_01_01_01
    assert codes[0, 33] == 0b00_01_01_01


def test_attention_by_hand() -> None:
    cache = oracle.Cache("f32", 4)
    for p, (k, v) in enumerate([(0.0, 1.0), (np.log(3) * 2, 5.0), (99.0, 7.0)]):
        cache.put(0, p, np.array([[k, 0, 0, 0]]), np.array([[v, 0, 0, 0]]))
    out = cache.attend(0, 1, np.array([[1.0, 0, 0, 0], [0.0, 0, 0, 0]]))
    assert np.allclose(out[:, 0], [(1 + 3 * 5) / 4, 3], rtol=1e-6)


def test_rotation_by_hand() -> None:
    """A quarter turn takes (a, b) to (-b, a)."""
    x, cos, sin = np.array([[1.0, 2, 3, 4]]), np.zeros(2), np.ones(2)
    assert oracle.rotate(x, cos, sin, "neox").tolist() == [[-3, -4, 1, 2]]
    assert oracle.rotate(x, cos, sin, "interleaved").tolist() == [[-2, 1, -4, 3]]


def test_a_nan_never_passes_a_bound() -> None:
    nan, one = np.array([[np.nan, 1]], np.float32), np.array([[1.0, 1]])
    with pytest.raises(AssertionError):
        rig.assert_rel("x", nan, one, 1e9)
    with pytest.raises(AssertionError):
        rig.assert_within("x", nan, one, 1e9)
    with pytest.raises(AssertionError):
        rig.assert_same_bits("x", nan, one.astype(np.float32))
