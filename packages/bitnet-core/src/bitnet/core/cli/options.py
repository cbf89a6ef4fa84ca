"""Options shared by several commands, named as in llama.cpp and Hugging Face tools.

Long, because it is one list, in which options for loading, sampling and thinking stand with what checks them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from bitnet.core.errors import InvalidInputError
from bitnet.core.hub.address import check_address, is_address
from bitnet.core.hub.names import PREFIX, parse
from bitnet.core.support.foreign import label

if TYPE_CHECKING:
    from bitnet.core.api import Model
    from bitnet.core.embedder import Embedder
    from bitnet.core.engine.options import OptionArguments

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def _complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the devices of this machine."""
    from bitnet.core.devices.registry import list_devices

    names = {"auto": "the best device", "gpu": "the best GPU"}
    for report in list_devices():
        if report.probe.devices:
            names[report.name] = f"the best device of {report.name}"
            names |= {d.name: d.description for d in report.probe.devices}
    return [CompletionItem(name, help=label(text)) for name, text in names.items() if name.startswith(incomplete)]


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete GGUF files if one matches, else whatever the shell would offer.

    Unprintable names are left out: shells read completions line by line.
    """
    if incomplete.startswith(PREFIX):
        repos = complete_cached(ctx, param, incomplete.removeprefix(PREFIX))
        return [CompletionItem(PREFIX + item.value) for item in repos]
    folder, start = os.path.split(incomplete)
    typed = incomplete.removesuffix(start)
    names = sorted(p.name for p in Path(folder or ".").glob("*.gguf") if p.name.startswith(start))
    names = [name for name in names if name.isprintable()]
    return [CompletionItem(typed + name, type="name") for name in names] or [CompletionItem(incomplete, type="file")]


def complete_cached(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete models in the hub's cache, by the names of its folders."""
    from bitnet.core.hub.cached import repos

    return [CompletionItem(repo) for repo in repos() if repo.startswith(incomplete)]


class FileName(click.Path):
    """A file name that is not empty. Whether the file can be read is checked when it is read."""

    def __init__(self) -> None:
        super().__init__(readable=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name of the file is empty.", param, ctx)
        return super().convert(value, param, ctx)


class ModelName(FileName):
    """A file name, or a ``str``: a model on the hub (``hf:…``) or in an object store (``s3://…``)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.startswith(PREFIX):
            return f"{PREFIX}{parse(value)}"
        if isinstance(value, str) and is_address(value):
            return check_address(value)
        return super().convert(value, param, ctx)


def utf8_text(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Text from the command line, decoded as UTF-8 even if the locale is ASCII."""
    if isinstance(value, tuple):
        return tuple(utf8_text(ctx, param, text) for text in value)
    try:
        return value.encode("utf-8", "strict").decode() if isinstance(value, str) else value
    except UnicodeEncodeError:  # surrogates that stand for undecodable bytes
        try:
            return os.fsencode(value).decode("utf-8")
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"it is not UTF-8 (at byte {error.start}).", ctx, param) from None


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _more_verbose(ctx: click.Context, param: click.Parameter, count: int) -> None:
    if count:
        from bitnet.core.support import log

        log.setup("info" if count == 1 else "debug")


verbose_option = click.option(
    "-v",
    "--verbose",
    count=True,
    expose_value=False,
    is_eager=True,
    callback=_more_verbose,
    help="Log to stderr; give it twice for debug messages.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def _no_second_model(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Reject -m after -hf, which is processed first and has stored its name as -m's value."""
    named = ctx.meta.get(_HUB_MODEL)
    if named is None:
        return value
    if value:
        raise click.UsageError("-m and -hf both name a model; give one of them.", ctx)
    return (named,) if param.multiple else named


def _take_hub_model(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[_HUB_MODEL] = f"{PREFIX}{parse(value)}"


_HUB_MODEL = "bitnet.core.cli.hub_model"

model_file_option = _together(
    click.option(
        "-m",
        "--model",
        metavar="FILE",
        type=ModelName(),
        shell_complete=_complete_model,
        callback=_no_second_model,
        help="GGUF model, hf:ORG/NAME[:FILE] or s3://BUCKET/KEY (gs, az).  [default: the small one in this package]",
    ),
    click.option(
        "-hf",
        "--hf-repo",
        metavar="ORG/NAME[:FILE]",
        expose_value=False,
        is_eager=True,
        callback=_take_hub_model,
        shell_complete=complete_cached,
        help="Model on the Hugging Face Hub, fetched unless it is in the cache (see 'bitnet pull').",
    ),
)
i2s_layout_option = click.option(
    "--i2s-layout",
    type=click.Choice(["official", "arm", "columns"]),
    default="official",
    show_default=True,
    help="How an I2_S file is packed; 'bitnet inspect' warns if it looks wrong.",
)
device_option = click.option(
    "--device",
    metavar="DEVICE",
    shell_complete=_complete_device,
    help="auto, gpu, a backend (cuda), a device (cuda:1, a UUID), a CPU level (cpu:avx2), or several with commas.  "
    "[default: BITNET_DEVICE, else auto]",
)
strict_option = click.option(
    "--strict",
    is_flag=True,
    default=None,
    help="Fail if the named device is missing, as with BITNET_STRICT_MODE=1.",
)
deterministic_option = click.option(
    "--deterministic",
    is_flag=True,
    default=None,
    help="Make tokens depend on the request alone, not on what else runs; slower.  [default: BITNET_DETERMINISTIC]",
)
prompt_lookup_option = click.option(
    "--prompt-lookup/--no-prompt-lookup",
    default=True,
    show_default=True,
    help="Draft text that repeats an earlier passage, if that is faster; the tokens are the same.",
)


def _absolute(ctx: click.Context, param: click.Parameter, value: Path | str | None) -> str | None:
    """A file's whole name, which other processes find."""
    return str(value.absolute()) if isinstance(value, Path) else value


draft_option = click.option(
    "--draft",
    metavar="FILE",
    type=ModelName(),
    callback=_absolute,
    shell_complete=_complete_model,
    help="GGUF with a layer of the model that drafts further tokens (MTP); the tokens are the same.",
)
THREADS_DEFAULT = "[default: BITNET_THREADS, else one for each physical core]"
context_option = click.option(
    "-c",
    "--context",
    "--ctx-size",
    metavar="N",
    type=int,
    help="Maximum tokens of prompt plus answer.  [default: the model's own, as memory allows]",
)
system_option = click.option(
    "--system",
    "--system-prompt",
    metavar="TEXT",
    callback=utf8_text,
    help="System message, for models whose chat template supports one.",
)
kv_dtype_option = click.option(
    "--kv-dtype",
    type=click.Choice(["f16", "f32", "i8"]),
    default="f16",
    show_default=True,
    help="Type of the KV cache; i8 takes half the memory of f16.",
)
threads_option = click.option(
    "-t", "--threads", metavar="N", type=click.IntRange(1, 1024), help=f"CPU threads.  {THREADS_DEFAULT}"
)
embedder_options = _together(
    model_file_option,
    device_option,
    strict_option,
    threads_option,
    kv_dtype_option,
    i2s_layout_option,
    verbose_option,
)
"""Options of commands that compute vectors of texts."""
model_options = _together(
    model_file_option,
    device_option,
    strict_option,
    threads_option,
    kv_dtype_option,
    i2s_layout_option,
    deterministic_option,
    prompt_lookup_option,
    draft_option,
    verbose_option,
)
sampling_options = _together(
    click.option(
        "-n",
        "--max-tokens",
        "--max-new-tokens",
        "--n-predict",
        metavar="N",
        type=int,
        default=512,
        show_default=True,
        help="Maximum tokens to generate; -1: until the context is full.",
    ),
    click.option(
        "--temperature",
        "--temp",
        metavar="T",
        type=float,
        default=0.0,
        show_default=True,
        help="0 always picks the likeliest token; higher values give more varied text.",
    ),
    click.option(
        "--top-k",
        metavar="K",
        type=int,
        default=0,
        show_default=True,
        help="Sample only from the K likeliest tokens (0: off).",
    ),
    click.option(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        show_default=True,
        help="Sample from the fewest tokens whose probabilities add up to P (1: off).",
    ),
    click.option(
        "--min-p",
        metavar="P",
        type=float,
        default=0.0,
        show_default=True,
        help="Sample from tokens at least P times as likely as the likeliest (0: off).",
    ),
    click.option(
        "--repetition-penalty",
        "--repeat-penalty",
        metavar="R",
        type=float,
        default=1.0,
        show_default=True,
        help="Divisor that makes tokens that already occurred less likely (1: off).",
    ),
    click.option(
        "-s", "--seed", metavar="N", type=int, help="Seed of the sampling; -1: a new one each time.  [default: -1]"
    ),
    click.option(
        "--stop",
        metavar="TEXT",
        multiple=True,
        callback=utf8_text,
        help="End the answer before this text; repeatable.",
    ),
)


thinking_options = _together(
    click.option("--no-think", is_flag=True, help="Have the model answer at once, without a thought before."),
    click.option("--hide-thinking", is_flag=True, help="Do not show the thought before an answer."),
    click.option(
        "--reasoning-budget",
        metavar="N",
        type=int,
        help="Maximum tokens of the thought before an answer; 0 is --no-think, -1 sets no limit.  [default: -1]",
    ),
)
"""Options for models that think before they answer."""

LOAD_OPTIONS = (
    "device",
    "strict",
    "context",
    "threads",
    "kv_dtype",
    "i2s_layout",
    "deterministic",
    "prompt_lookup",
    "draft",
)
"""Options that are arguments of :func:`~bitnet.core.load_model`, under the same names."""


def load(params: dict[str, Any], *, context_name: str = "--context", **more: Any) -> Model:
    """Load the model that :data:`model_options` describe; other entries of ``params`` are ignored.

    Args:
        context_name: What errors call the context of a command without ``--context``.
    """
    from bitnet.core.loading import load_model

    return load_by(load_model, params, context_name=context_name, **more)


def load_embedder(params: dict[str, Any], **more: Any) -> Embedder:
    """As :func:`load`, for a command that computes vectors of texts."""
    from bitnet.core.loading import load_embedder as loader

    return load_by(loader, params, **more)


def load_by(loader: Callable[..., T], params: dict[str, Any], *, context_name: str = "--context", **more: Any) -> T:
    """As :func:`load`, by a loader with the arguments of :func:`~bitnet.core.load_model`."""
    from bitnet.core.cli.console import compile_progress, note
    from bitnet.core.hub import local_path
    from bitnet.core.support.garbage import no_collection

    path = None if params["model"] is None else local_path(params["model"], tell=note)
    with compile_progress(), _option_names(context=context_name), no_collection():
        return loader(path, **{name: params[name] for name in LOAD_OPTIONS if name in params} | more)


def sampling(params: dict[str, Any], **more: Any) -> OptionArguments:
    """The arguments of ``generate`` from :data:`sampling_options` and :data:`thinking_options`, and ``more`` of them,
    checked."""
    from bitnet.core.engine.options import GenerationOptions

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    options = {name: params[name] for name in names} | more
    budget = params.get("reasoning_budget")
    if params.get("no_think"):
        if budget:
            raise click.UsageError("--no-think and --reasoning-budget exclude each other.")
        budget = 0
    options["reasoning_budget"] = budget
    options |= {name: None for name in ("max_tokens", "seed", "reasoning_budget") if options[name] == -1}
    with _option_names():
        GenerationOptions(**options)  # before a model is loaded, so that an error is reported at once
    return cast("OptionArguments", options)


_SPELLED = {"max_seqs": "--parallel", "step_tokens": "--batch-size"}
"""Python arguments whose command-line options have other names."""


@contextmanager
def _option_names(context: str = "--context") -> Iterator[None]:
    """In this context, errors name options instead of Python arguments, and the option's word for None."""
    from bitnet.core.engine.options import OptionArguments

    arguments = "|".join((*OptionArguments.__annotations__, *_SPELLED, "context"))
    try:
        yield
    except InvalidInputError as error:
        if not (found := re.match(rf"({arguments}) (?:is|holds) ", error.message)):
            raise
        name = found[1]
        option = {**_SPELLED, "context": context}.get(name) or f"--{name.replace('_', '-')}"
        rest = error.message[len(name) :].replace(", or None", ", or -1").replace(" (step_tokens)", "")
        raise InvalidInputError(option + rest, hint=error.hint) from None
