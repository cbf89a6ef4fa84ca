"""The command dies, the deployment goes on, and the same command finds it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from .conftest import Node, Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]


def test_a_killed_command_finds_its_deployment_again(
    head: Callable[..., AbstractContextManager[Node]],
    served: Callable[..., AbstractContextManager[Served]],
    environment: Mapping[str, str],
) -> None:
    with head(2) as node:
        options = ["-c", "512", "--address", node.address]
        with served(environment, *options) as first:
            assert first.status() == 200
            first.process.kill()
            first.process.wait()
            assert first.status() == 200
        with served(environment, *options, port=first.port) as second:
            assert second.status() == 200
        assert second.process.returncode == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{second.url}/health")
