"""``bitnet pull``: models from the Hugging Face Hub, in its cache."""

from __future__ import annotations

from pathlib import Path

import click

from bitnet.core.cli.console import note, say
from bitnet.core.cli.options import verbose_option


@click.command()
@click.argument("name")
@click.option("--convert", "to_convert", is_flag=True, help="Make NAME.gguf here of a model that has only safetensors.")
@verbose_option
def pull(name: str, to_convert: bool) -> None:
    """Download a model from the Hugging Face Hub into its cache, and print where its file is.

    NAME is ORG/NAME, or ORG/NAME:FILE with a file or an encoding (i2_s) of it; without, the file is taken that runs
    best here. What is there already is not downloaded again, and what broke off goes on. HF_TOKEN, HF_HOME,
    HF_HUB_OFFLINE and HF_ENDPOINT work as in huggingface_hub.

    \b
    bitnet pull microsoft/bitnet-b1.58-2B-4T-gguf
    bitnet run -hf microsoft/bitnet-b1.58-2B-4T-gguf "What is 17 + 25?"
    """
    from bitnet.core.hub.errors import ConversionNeededError
    from bitnet.core.hub.names import parse
    from bitnet.core.hub.pull import locate

    model = parse(name)
    try:
        say(str(locate(model, update=True, tell=note)))
    except ConversionNeededError:
        if not to_convert:
            raise
        from bitnet.core.cli.convert import convert_to

        convert_to(f"hf:{model.repo}", Path(f"{model.repo.rpartition('/')[2]}.gguf"))
