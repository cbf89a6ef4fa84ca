"""``bitnet pull``, ``list`` and ``rm``: models from the Hugging Face Hub, in its cache."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bitnet.core.cli.console import note, print_json, say
from bitnet.core.cli.options import complete_cached, json_option, verbose_option
from bitnet.core.support.foreign import label
from bitnet.core.support.units import size


@click.command()
@click.argument("name", shell_complete=complete_cached)
@click.option(
    "--convert", "to_convert", is_flag=True, help="Convert a model that has only safetensors to NAME.gguf here."
)
@verbose_option
def pull(name: str, to_convert: bool) -> None:
    """Download a model from the Hugging Face Hub.

    The file goes into the hub's own cache; its path is printed.

    NAME is ORG/NAME, or ORG/NAME:FILE, where FILE is one of its files or an encoding (i2_s); without FILE, the file
    that runs best here is chosen. A complete file is not downloaded again, and an interrupted download resumes.
    HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT work as in huggingface_hub.

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


@click.command("list")
@json_option
@verbose_option
def list_models(as_json: bool) -> None:
    """List the models downloaded from the Hugging Face Hub.

    One line for each GGUF file in the hub's cache: name, size, family and path.

    -hf and 'bitnet rm' accept each name. The cache also holds the models of other programs that use the hub.
    """
    from bitnet.core.hub.cached import cache_folder, models

    found = models()
    if as_json:
        names = ("repo", "file", "size", "family", "path")
        print_json([{name: getattr(m, name) for name in names} | {"path": str(m.path)} for m in found])
        return
    if not found:
        note(f"No model is in {cache_folder()}; 'bitnet pull ORG/NAME' downloads one.")
        return
    width = max(len(f"{m.repo}:{m.file}") for m in found)
    for m in found:
        family = "unreadable" if (name := m.family) is None else label(name)
        say(f"{m.repo + ':' + m.file:<{width}}  {size(m.size):>8}  {family:<12}  {m.path}")


@click.command("rm")
@click.argument("name", shell_complete=complete_cached)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@verbose_option
def remove(name: str, yes: bool) -> None:
    """Remove a model from the Hugging Face Hub's cache.

    NAME is ORG/NAME, which removes all of the model's files, or ORG/NAME:FILE, where FILE is one of its files or an
    encoding. Other programs that share the cache lose the model, too.

    \b
    bitnet rm microsoft/bitnet-b1.58-2B-4T-gguf
    """
    from bitnet.core.hub.names import parse
    from bitnet.core.hub.removal import plan

    model = parse(name)
    planned = plan(model)
    what = f"{model} ({', '.join(planned.files[:5]) or 'a part of a download'}; {size(planned.size)})"
    if len(planned.files) > 5:
        what = f"{model} ({len(planned.files)} files; {size(planned.size)})"
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("no terminal to confirm at; use -y to remove without asking.")
        if not click.confirm(f"Remove {what}?", err=True):
            raise click.Abort
    planned.execute()
    say(f"removed {what}")
