"""The pooling that a file names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.model.pooling import pooling_of


@pytest.mark.parametrize(("number", "pooling"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last")])
def test_poolings(tiny: Callable[..., Any], number: int | None, pooling: str | None) -> None:
    model = tiny()
    if number is not None:
        model.metadata[model.key("pooling_type")] = number
    assert pooling_of(model.open()) == pooling


@pytest.mark.parametrize("value", [4, -1, "mean", 1.0, True])
def test_what_is_no_pooling(tiny: Callable[..., Any], value: Any) -> None:
    model = tiny()
    model.metadata[model.key("pooling_type")] = value
    with pytest.raises(ModelFileError, match="supported are 0"):
        pooling_of(model.open())
