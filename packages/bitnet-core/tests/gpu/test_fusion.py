"""Which neighbouring operations may become one kernel."""

from __future__ import annotations

from bitnet.core.gpu.fusion import feeds, rotates_for
from bitnet.core.hal import Attention, GluNormQuant, NormQuant, RopeAppend, TernaryMatmul

NORM = NormQuant("x", "w", 1e-5, "q", "s")
PRODUCT = TernaryMatmul("q", "s", ("m",), "out")


def test_a_product_takes_the_quantisation_before_it() -> None:
    assert feeds(NORM, PRODUCT, [])
    assert not feeds(NORM, TernaryMatmul("other", "s", ("m",), "out"), [])


def test_not_where_another_product_takes_it_too() -> None:
    assert not feeds(NORM, PRODUCT, [TernaryMatmul("q", "s", ("n",), "y")])
    again = NormQuant("y", "w", 1e-5, "q", "s")
    assert feeds(NORM, PRODUCT, [again, TernaryMatmul("q", "s", ("n",), "y")])


def test_not_where_the_product_writes_what_the_quantisation_reads() -> None:
    assert not feeds(NORM, TernaryMatmul("q", "s", ("m",), "x", add=True), [])
    glu = GluNormQuant("x", "w", 1e-5, "relu2", "q", "s")
    assert not feeds(glu, TernaryMatmul("q", "s", ("m",), "x"), [])


def test_a_rotation_is_its_attentions_alone() -> None:
    rope, attention = RopeAppend("qkv", 1, 4, 2, 32, "cos", "sin"), Attention("qkv", "out", 1, 4, 2, 32)
    assert rotates_for(rope, attention, [NORM, PRODUCT])
    assert not rotates_for(rope, Attention("qkv", "out", 0, 4, 2, 32), [])
    assert not rotates_for(rope, Attention("other", "out", 1, 4, 2, 32), [])
    for reader in (Attention("qkv", "more", 1, 4, 2, 32), NormQuant("qkv", None, 1e-5, "q", "s")):
        assert not rotates_for(rope, attention, [NORM, reader])
        assert rotates_for(rope, attention, [TernaryMatmul("q", "s", ("m",), "qkv"), reader])
    assert not rotates_for(rope, attention, [TernaryMatmul("q", "s", ("m",), "qkv", add=True)])
