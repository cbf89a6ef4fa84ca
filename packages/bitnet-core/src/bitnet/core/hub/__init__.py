"""Models from the Hugging Face Hub (names such as ``hf:ORG/NAME``): choice of file, download, cache; and object stores.

``huggingface_hub`` talks to the hub and owns the cache; it is imported when a name is first looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bitnet.core.hub.address import is_address
from bitnet.core.hub.names import PREFIX, parse
from bitnet.core.support.log import logger


def local_path(model: str | Path, *, tell: Callable[[str], None] = logger.info) -> Path:
    """The path of a model file. A name on the hub (``hf:…``) or an address in an object store (``s3://…``) is
    downloaded unless it is cached.

    Args:
        tell: Called with the file that was chosen and why, before a download.

    Raises:
        HubError: The model cannot be downloaded from the hub.
        ObjectStoreError: It cannot be downloaded from the object store.
        InvalidInputError: It begins with ``hf:`` or a store's scheme, but is not a valid name or address.
    """
    if isinstance(model, str) and is_address(model):
        from bitnet.core.hub import object_store

        return object_store.locate(model, tell=tell)
    if not isinstance(model, str) or not model.startswith(PREFIX):
        return Path(model)
    from bitnet.core.hub.pull import locate

    return locate(parse(model), tell=tell)
