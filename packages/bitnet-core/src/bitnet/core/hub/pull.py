"""Finds or downloads the file for a name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from bitnet.core.errors import InvalidInputError
from bitnet.core.hub import cached
from bitnet.core.hub.choice import choose
from bitnet.core.hub.download import Progress, fetch
from bitnet.core.hub.errors import ConversionNeededError, ModelNotFoundError
from bitnet.core.hub.names import HubName
from bitnet.core.hub.remote import Listing, library, listing
from bitnet.core.support.log import logger
from bitnet.core.support.units import size

_TO_CONVERT = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|added_tokens)\.json|tokenizer\.model|chat_template\.jinja"
    r"|[^/]+\.safetensors|model\.safetensors\.index\.json"
)
"""Files of a folder that ``bitnet convert`` reads."""


def locate(
    name: HubName,
    *,
    update: bool = False,
    tell: Callable[[str], None] = logger.info,
    progress: Progress | None = None,
) -> Path:
    """The path of a model's GGUF file (the first part of a split one) in the cache, after downloading it if needed.

    Args:
        update: Ask the hub for a newer version even if the file is cached, unless ``HF_HUB_OFFLINE`` is set.
        tell: Called with the file that was chosen and why, before it is downloaded.
        progress: As for :func:`~bitnet.core.hub.download.fetch`.

    Raises:
        HubError: The file is not available; :mod:`bitnet.core.hub.errors` lists the reasons.
    """
    found = cached.find(name)
    if found is not None and (not update or _offline()):
        return found
    there = listing(name.repo)
    choice = choose(name, there.files)
    if choice is None:
        raise _without_gguf(name, there)
    file = choice.file
    parts = f" and {len(file.others)} more parts" if file.others else ""
    tell(f"{name.repo}: {file.path}{parts}, {size(file.total)}{': ' if choice.why else ''}{choice.why}")
    return fetch(there, [file, *file.others], progress)[0]


def weights_folder(name: HubName) -> Path:
    """The cache folder with a model's safetensors, configuration and tokenizer, as input for ``bitnet convert``.

    Raises:
        HubError: The files are not available, or the model has no safetensors.
        InvalidInputError: The name includes a file.
    """
    if name.file is not None:
        raise InvalidInputError(f"{name} names one file; to convert a model, leave the file out: hf:{name.repo}.")
    there = listing(name.repo)
    files = [file for file in there.files if _TO_CONVERT.fullmatch(file.path)]
    if not any(file.path.endswith(".safetensors") for file in files):
        raise ModelNotFoundError(f"{name.repo} has no safetensors to convert.")
    return fetch(there, files)[0].parent


def _without_gguf(name: HubName, there: Listing) -> ConversionNeededError | ModelNotFoundError:
    weights = [file for file in there.files if file.path.endswith(".safetensors")]
    if not weights:
        return ModelNotFoundError(f"{name.repo} has no GGUF file.")
    target = f"{name.repo.rpartition('/')[2]}.gguf"
    return ConversionNeededError(
        f"{name.repo} has no GGUF file, only safetensors of {size(sum(file.size for file in weights))}.",
        hint=f"Download and convert them: bitnet convert hf:{name.repo} {target}",
    )


def _offline() -> bool:
    library()
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
