"""Which neighbouring operations may become one kernel."""

from __future__ import annotations

from bitnet.core.gpu.fusion import feeds
from bitnet.core.hal import GluNormQuant, NormQuant, TernaryMatmul

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
