"""A Serve config file, for ``serve deploy`` and for the ``serveConfigV2`` of KubeRay's RayService."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from bitnet.core.support.files import replacing
from bitnet.server.ray.plan import APPLICATION, Plan

HEAD = "# Made by `bitnet serve --ray --write-config`. API keys are not in it: set BITNET_API_KEY on every node.\n"


def document(plan: Plan, http: dict[str, Any], route: str, log_format: str) -> dict[str, Any]:
    """The config as JSON values, checked with Serve's own schema."""
    made = {
        "proxy_location": "EveryNode",
        "http_options": http,
        "logging_config": {"encoding": log_format.upper()},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": route,
                "import_path": "bitnet.server.ray.application:build",
                "args": plan.document(),
            }
        ],
    }
    ServeDeploySchema.model_validate(made)
    return made


def write(path: Path, made: dict[str, Any]) -> None:
    """Write a config; if that fails, an existing file is left unchanged.

    Raises:
        BitNetError: The file cannot be written.
    """
    with replacing(path) as out:
        out.write((HEAD + yaml.safe_dump(made, sort_keys=False, allow_unicode=True)).encode())
