"""Loading a model with ``deterministic``: which devices refuse it, and what receipts record."""

import pytest

from bitnet.core import load_model, receipts
from bitnet.core.engine.setup import DETERMINISTIC_TOKENS
from bitnet.core.errors import InvalidInputError, UnsupportedProgramError


def test_a_receipt_says_it_and_holds() -> None:
    with load_model(device="cpu", context=64, deterministic=True) as model:
        assert model.deterministic
        done = model.generate("Hello", max_tokens=4)
        receipt = model.receipt(done, prompt="Hello")
    assert receipt["setup"]["deterministic"] is True
    assert receipt["setup"]["step_tokens"] == DETERMINISTIC_TOKENS
    receipts.verify(receipt)


def test_the_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DETERMINISTIC", "1")
    with load_model(device="cpu", context=64) as model:
        assert model.deterministic
    with load_model(device="cpu", context=64, deterministic=False) as model:
        assert not model.deterministic


def test_a_device_that_cannot_refuses() -> None:
    with pytest.raises(UnsupportedProgramError, match="cannot compute deterministically"):
        load_model(device="cpu:numpy", context=64, deterministic=True)


def test_sizes_that_a_deterministic_step_has_not() -> None:
    with pytest.raises(InvalidInputError, match="step_tokens is 32; leave it out: deterministic steps have 64"):
        load_model(device="cpu", context=64, deterministic=True, step_tokens=32)
    with pytest.raises(InvalidInputError, match="max_seqs is 65; it must be in 1 … 64"):
        load_model(device="cpu", context=64, deterministic=True, max_seqs=65)
