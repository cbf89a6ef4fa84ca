"""Models from the Hugging Face Hub: names such as ``hf:ORG/NAME``, the file to take, its download, and what is cached.

``huggingface_hub`` does the talking and owns the cache; it is imported when a name is first looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bitnet.core.hub.names import PREFIX, parse
from bitnet.core.support.log import logger


def local_path(model: str | Path, *, tell: Callable[[str], None] = logger.info) -> Path:
    """The path of a model file, which may be a name on the hub (``hf:…``); that is downloaded where it is not cached.

    Args:
        tell: Called with the file that was chosen and why, before a download.

    Raises:
        HubError: The model cannot be had from the hub.
        InvalidInputError: It begins with ``hf:`` and is no name.
    """
    if not isinstance(model, str) or not model.startswith(PREFIX):
        return Path(model)
    from bitnet.core.hub.pull import locate

    return locate(parse(model), tell=tell)
