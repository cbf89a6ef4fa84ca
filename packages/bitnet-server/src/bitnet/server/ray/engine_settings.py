"""How a process on the cluster loads its model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from bitnet.core import Model, load_model
from bitnet.core.hub import local_path

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a replica loads its model.

    Attributes:
        model: A file on its node, ``hf:ORG/NAME``, or None for the demo model.
        options: Arguments of :func:`~bitnet.core.load_model`.
    """

    model: str | None
    options: Mapping[str, Any]

    def load(self) -> Model:
        """Load it on the device that Ray gave this replica: a GPU, or the CPU if it gave none."""
        options = dict(self.options)
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU")
        if options.get("device") in (None, "auto"):
            options["device"] = "gpu" if gpus else "cpu"
            options["strict"] = bool(gpus) or options.get("strict")
        path = None if self.model is None else local_path(self.model, tell=log.info)
        return load_model(path, **options)
