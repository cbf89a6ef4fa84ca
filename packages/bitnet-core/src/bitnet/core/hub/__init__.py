"""Models from the Hugging Face Hub: names such as ``hf:ORG/NAME``, choice of file, download, and cache.

``huggingface_hub`` talks to the hub and owns the cache; it is imported when a name is first looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bitnet.core.hub.names import PREFIX, parse
from bitnet.core.support.log import logger


def local_path(model: str | Path, *, tell: Callable[[str], None] = logger.info) -> Path:
    """The path of a model file. A name on the hub (``hf:…``) is downloaded unless it is cached.

    Args:
        tell: Called with the file that was chosen and why, before a download.

    Raises:
        HubError: The model cannot be downloaded from the hub.
        InvalidInputError: It begins with ``hf:`` but is not a valid name.
    """
    if not isinstance(model, str) or not model.startswith(PREFIX):
        return Path(model)
    from bitnet.core.hub.pull import locate

    return locate(parse(model), tell=tell)
