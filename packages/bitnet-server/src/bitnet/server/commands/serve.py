"""``bitnet serve``. ``bitnet --help`` imports this module, so it imports the server inside functions."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import read_text
from bitnet.core.cli.options import LOAD_OPTIONS, FileName, context_option, load_by
from bitnet.core.errors import InvalidInputError
from bitnet.server.commands.options import (
    Finite,
    Grouped,
    check_ray,
    cluster_only,
    cluster_options,
    isolate_option,
    mcp_option,
    model_aliases,
    models_option,
    not_empty,
    root_path,
    several_models,
)

if TYPE_CHECKING:
    from bitnet.core import Model
    from bitnet.server.http.listening import Listen
    from bitnet.server.isolated.backend import Isolated
    from bitnet.server.models.catalog import Catalog
    from bitnet.server.models.presets import ModelSettings
    from bitnet.server.models.service import Source
    from bitnet.server.models.settings import Settings


@click.command(cls=Grouped)
@several_models
@models_option
@isolate_option
@context_option
@click.option(
    "--alias",
    metavar="NAME",
    multiple=True,
    callback=not_empty,
    help="Name for clients; one for each -m, in order. One model may have several.  [default: the file's]",
)
@click.option(
    "--model-alias",
    metavar="PATTERN=NAME",
    multiple=True,
    callback=model_aliases,
    help="Let NAME answer for other names, such as 'claude-*=NAME'; repeatable.",
)
@click.option("--any-model", is_flag=True, help="Let the first model answer requests for models that are not here.")
@click.option(
    "-np",
    "--parallel",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Maximum requests that run at the same time.",
)
@click.option(
    "--max-queue",
    metavar="N",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Maximum waiting requests; further ones get status 429.",
)
@click.option(
    "--max-queue-tokens",
    metavar="N",
    type=click.IntRange(0),
    help="Maximum waiting prompt tokens.  [default: no limit]",
)
@click.option(
    "--max-memory",
    metavar="GB",
    type=Finite(min=0, min_open=True),
    help="Maximum gigabytes of all models; the least recently used are unloaded.  [default: no limit]",
)
@click.option(
    "--max-stored",
    metavar="N",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Responses kept in memory for previous_response_id.",
)
@click.option(
    "--file-storage",
    metavar="DIR",
    type=FileName(),
    help="Folder for clients' files and batches.  [default: there are neither]",
)
@click.option(
    "--max-file-storage",
    metavar="GB",
    type=Finite(min=0, min_open=True),
    default=1,
    show_default=True,
    help="Maximum gigabytes of these files.",
)
@click.option(
    "--slot-save-path",
    metavar="DIR",
    type=FileName(),
    help="Folder to which llama.cpp's /slots saves.  [default: slots are not saved]",
)
@click.option(
    "--reasoning-budget", metavar="N", type=click.IntRange(0), help="Maximum tokens of a thought.  [default: no limit]"
)
@click.option(
    "--timeout",
    metavar="S",
    type=Finite(min=0, min_open=True),
    help="Maximum seconds for a request.  [default: no limit]",
)
@click.option(
    "--max-body",
    metavar="MB",
    type=Finite(min=0, min_open=True),
    default=16,
    show_default=True,
    help="Maximum megabytes of a request's body.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    callback=not_empty,
    help="Address to listen on; 0.0.0.0: all interfaces.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0: any free one.",
)
@click.option("--uds", metavar="FILE", type=FileName(), help="UNIX socket to listen on instead.")
@click.option(
    "--root-path",
    metavar="PATH",
    default="",
    callback=root_path,
    help="Path prefix under which a proxy serves this, whether it strips the prefix or not.",
)
@click.option("--ssl-certfile", metavar="FILE", type=FileName(), help="Certificate, for HTTPS.")
@click.option("--ssl-keyfile", metavar="FILE", type=FileName(), help="Private key of the certificate.")
@click.option(
    "--api-key",
    metavar="KEY",
    multiple=True,
    envvar="BITNET_API_KEY",
    show_envvar=True,
    callback=not_empty,
    help="API key that requests must have; repeatable.",
)
@click.option("--api-key-file", metavar="FILE", type=FileName(), help="File of API keys, one per line.")
@click.option(
    "--cors",
    metavar="ORIGIN",
    multiple=True,
    help="Origin whose pages may call the server; localhost: any port here; *: all; repeatable.  [default: none]",
)
@click.option("--page/--no-page", default=True, show_default=True, is_eager=True, help="Serve the chat page at /.")
@mcp_option
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the access log, which contains no prompts.",
)
@click.option(
    "--drain",
    metavar="S",
    type=Finite(min=0),
    default=30,
    show_default=True,
    help="Seconds within which running requests must end after SIGTERM.",
)
@cluster_options
@click.option(
    "--min-replicas",
    metavar="N",
    type=click.IntRange(0, 10_000),
    callback=cluster_only,
    help="Minimum replicas with --replicas auto; 0: none while there is nothing to do.  [default: 1]",
)
@click.option(
    "--write-config",
    metavar="FILE",
    type=FileName(),
    callback=cluster_only,
    help="Deploy nothing, and write the config for 'serve deploy' and KubeRay.",
)
def serve(**params: Any) -> None:
    """Serve models over HTTP: the OpenAI, Anthropic and Ollama APIs, and a chat page.

    \b
    bitnet serve -m model.gguf
    bitnet serve -m small.gguf -m large.gguf --max-memory 8
    bitnet serve --models ~/models --max-memory 8
    bitnet serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt
    bitnet serve -m model.gguf --ray --address auto --replicas 4
    """
    if params["ssl_keyfile"] is not None and params["ssl_certfile"] is None:
        raise click.UsageError("--ssl-keyfile needs --ssl-certfile, the certificate that the key belongs to.")
    for name in ("ssl_certfile", "ssl_keyfile"):
        if params[name] is not None:
            _check_readable(f"--{name.replace('_', '-')}", params[name])
    if params["uds"] is not None and not params["uds"].absolute().parent.is_dir():
        raise InvalidInputError(f"--uds {params['uds']}: its folder does not exist.")
    if params["slot_save_path"] is not None and not params["slot_save_path"].is_dir():
        raise InvalidInputError(f"--slot-save-path {params['slot_save_path']} is not a folder.")

    from bitnet.server.http.listening import Listen, serve_models
    from bitnet.server.models.settings import Settings

    settings = Settings(
        api_keys=(*params["api_key"], *_keys_of(params["api_key_file"])),
        max_queue=params["max_queue"],
        max_seqs=params["parallel"],
        max_body=int(params["max_body"] * 1e6),
        timeout=params["timeout"],
        cors=params["cors"],
        page=params["page"],
        mcp=params["mcp"],
        max_stored=params["max_stored"],
        file_storage=None if params["file_storage"] is None else str(params["file_storage"].absolute()),
        max_file_storage=int(params["max_file_storage"] * 1e9),
        slot_save_path=None if params["slot_save_path"] is None else str(params["slot_save_path"].absolute()),
        reasoning_budget=params["reasoning_budget"],
        model_aliases=params["model_alias"],
        any_model=params["any_model"],
        max_memory=None if params["max_memory"] is None else int(params["max_memory"] * 1e9),
    )
    names = ("host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile", "log_format", "drain")
    listen = Listen(**{name: params[name] for name in names})
    if params["ray"]:
        _serve_on_ray(params, settings, listen)
    else:
        serve_models(_sources(params), settings, listen, _catalog(params))


def _serve_on_ray(params: dict[str, Any], settings: Settings, listen: Listen) -> None:
    for name in ("uds", "isolate", "slot_save_path"):
        if params[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} and --ray exclude each other.")
    if params["min_replicas"] is not None and params["replicas"] != "auto":
        raise click.UsageError("--min-replicas needs --replicas auto.")
    if listen.port == 0:
        raise click.UsageError("--port 0 and --ray exclude each other: every node listens on the same port.")
    check_ray("ray", "ray")
    from bitnet.core.gguf import GGUFFile
    from bitnet.server.ray.deploy import Wanted, serve_on_ray
    from bitnet.server.ray.plan import Plan

    folder = params["models"]
    if params["max_memory"] is not None and folder is None:
        raise click.UsageError("--max-memory with --ray needs --models: a model of -m is never unloaded.")
    only_folder = _only_folder(params)
    named = [] if only_folder else _named(params)
    for _, path in named:
        GGUFFile(path)
    wanted_files = () if only_folder else params["model"] or (None,)
    files = [file if file is None or isinstance(file, str) else str(file.absolute()) for file in wanted_files]
    options = {name: params[name] for name in LOAD_OPTIONS if name in params}
    plan = Plan(
        models=tuple((names, file) for (names, _), file in zip(named, files, strict=True)),
        options={**options, "max_seqs": params["parallel"], "max_queue_tokens": params["max_queue_tokens"]},
        settings=settings,
        folder=None if folder is None else str(folder.absolute()),
        replicas=None if params["replicas"] == "auto" else params["replicas"] or 1,
        min_replicas=1 if params["min_replicas"] is None else params["min_replicas"],
        drain=params["drain"],
        local=not listen.beyond_this_machine,
    )
    listen.warn_if_open(settings)
    wanted = Wanted(
        address=params["address"],
        gpus=params["gpus_per_replica"],
        cpus=params["threads"],
        write_config=params["write_config"],
    )
    serve_on_ray(plan, wanted, listen)


def _named(params: dict[str, Any]) -> list[tuple[tuple[str, ...], Path]]:
    """The models' names and files."""
    from bitnet.core.gguf.split import whole_name
    from bitnet.core.hub import local_path
    from bitnet.core.model.default import default_model_path

    files, aliases = params["model"] or (None,), params["alias"]
    paths = [default_model_path() if file is None else Path(local_path(file)) for file in files]
    if len(files) == 1 and aliases:
        names = [tuple(aliases)]
    elif aliases and len(aliases) != len(files):
        raise InvalidInputError(f"--alias names {len(aliases)} of {len(files)} models; give it once for each.")
    else:
        names = [(name,) for name in aliases] or _names(files, [whole_name(path.stem) for path in paths])
    every = [name for some in names for name in some]
    if len(set(every)) < len(every):
        raise InvalidInputError("two models have the same name.", hint="Name them with --alias.")
    return list(zip(names, paths, strict=True))


def _only_folder(params: dict[str, Any]) -> bool:
    """Whether a models folder has all models."""
    if params["models"] is None or params["model"]:
        return False
    if params["alias"]:
        raise click.UsageError(f"--alias needs -m; {params['models'] / 'models.toml'} may have aliases.")
    return True


def _sources(params: dict[str, Any]) -> list[Source]:
    """The models, their names, and how to load them; with a models folder, only those that are named."""
    from bitnet.core.gguf import GGUFFile
    from bitnet.server.models.service import Source

    if _only_folder(params):
        return []
    named = _named(params)
    paths = [path for _, path in named]
    for path in paths[1:]:  # these models are loaded on demand, but a broken file is an error now
        GGUFFile(path)
    loads = [partial(_load, {**params, "model": path}, params["isolate"]) for path in paths]
    return [Source(*found, load) for found, load in zip(named, loads, strict=True)]


def _load(params: dict[str, Any], isolated: bool) -> Model | Isolated:
    """Load a model, in a process of its own if asked."""
    from bitnet.core.loading import load_model
    from bitnet.server.isolated.backend import load_isolated

    bounds = {"max_seqs": params["parallel"], **{name: params[name] for name in ("max_queue", "max_queue_tokens")}}
    loader: Callable[..., Model | Isolated] = load_isolated if isolated else load_model
    return load_by(loader, params, **bounds)


def _catalog(params: dict[str, Any]) -> Catalog | None:
    """The models of the folder and of the hub's cache, if there is a folder."""
    from bitnet.server.models.catalog import Catalog

    if params["models"] is None:
        return None

    def loaded(name: str, path: Path, settings: ModelSettings) -> Model | Isolated:
        own = {name: value for name in ("context", "device") if (value := getattr(settings, name)) is not None}
        return _load({**params, **own, "model": path}, params["isolate"] or settings.isolate)

    return Catalog(params["models"], loaded)


def _names(files: Sequence[Any], stems: Sequence[str]) -> list[tuple[str, ...]]:
    """Names of models. One from the hub has the name by which it was asked for, its repository's and its file's, and
    another one its file's; all but the first only where no other model has them."""
    from bitnet.core.hub.names import PREFIX, parse

    asked = [parse(file) if isinstance(file, str) and file.startswith(PREFIX) else None for file in files]
    several = [
        [stem] if name is None else [*dict.fromkeys((str(name), name.repo, stem))]
        for name, stem in zip(asked, stems, strict=True)
    ]
    count = Counter(name for names in several for name in names)
    return [(names[0], *(name for name in names[1:] if count[name] == 1)) for names in several]


def _check_readable(option: str, file: Path) -> None:
    """Raise an error that names the option and the file, as those of TLS do not."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # OpenSSL opens it twice, and would wait for a pipe's other end
            raise InvalidInputError(f"{option} {file} is not a file.")
        file.open("rb").close()
    except OSError as error:
        raise InvalidInputError(f"{option} {file} cannot be read: {error.strerror}.") from None


def _keys_of(file: Path | None) -> list[str]:
    if file is None:
        return []
    keys = [line.strip() for line in read_text(file).splitlines()]
    if not any(keys):
        raise InvalidInputError(f"--api-key-file {file} has no key.", hint="Write one key on each line.")
    return [key for key in keys if key]
