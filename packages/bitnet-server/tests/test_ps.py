"""``bitnet ps``: errors if it cannot reach a server, and keys in any script."""

from __future__ import annotations

from typing import Any

import pytest

from bitnet.core import Model
from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.server.commands.ps import _ask


def test_a_key_of_any_script_is_sent(demo_model: Model, running: Any) -> None:
    with running(demo_model, names=("demo",), api_keys=("ключ",)) as server:
        assert [model["id"] for model in _ask(server.url, "ключ")] == ["demo"]
        with pytest.raises(BitNetError, match="requires an API key"):
            _ask(server.url, "замок")


@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("http://[::1", None, r"http://\[::1 is not a server address: Invalid IPv6 URL"),
        (f"http://{'a' * 70}.example", None, "is not a server address: "),
        ("http://127.0.0.1:9", "one\ntwo", "the API key holds a line break"),
    ],
)
def test_what_cannot_be_asked(url: str, key: str | None, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as raised:
        _ask(url, key)
    assert "two" not in str(raised.value)


def test_another_server_is_told_from_one_of_ours(demo: Any) -> None:
    with pytest.raises(BitNetError, match="is not a bitnet server"):
        _ask(f"{demo.url}/health?", None)
