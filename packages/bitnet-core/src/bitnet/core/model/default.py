"""The model that comes with bitnet."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bitnet.core.errors import BitNetError


def default_model_path() -> Path:
    """The demo model, shipped in the wheel.

    Raises:
        BitNetError: It is missing from this installation.
    """
    path = Path(str(files("bitnet.core") / "data" / "bitnet-demo.gguf"))
    if not path.is_file():
        raise BitNetError(f"the demo model is missing: {path}.", hint="Reinstall bitnet-core, or name a model file.")
    return path
