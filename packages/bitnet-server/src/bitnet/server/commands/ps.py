"""``bitnet ps``: queries a running server. ``bitnet --help`` imports this, so functions import the rest."""

from __future__ import annotations

import json
from typing import Any

import click

from bitnet.core.cli.console import print_json, say
from bitnet.core.cli.options import json_option
from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.support.units import size

SECONDS = 10.0
"""Maximum seconds for a server to answer."""


@click.command()
@click.argument("url", default="http://127.0.0.1:8080")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="BITNET_API_KEY",
    show_envvar=True,
    help="One of the server's API keys.",
)
@json_option
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """Show a server's models, their devices, and running and waiting requests.

    URL is the server's address, by default http://127.0.0.1:8080.
    """
    models = _ask(url.rstrip("/"), api_key)
    if as_json:
        print_json(models)
        return
    rows = [("MODEL", "STATE", "DEVICE", "MEMORY", "RUNNING", "WAITING"), *map(_row, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    say(*("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows))


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    counts = (str(model.get(name, "-")) for name in ("running", "waiting"))
    return model["id"], model["state"], model.get("device", "-"), size(model["bytes"]), *counts


def _ask(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The models of a server: id, state, bytes, and, if loaded, device and running and waiting requests.

    Raises:
        BitNetError: No server answers there, it refuses the request, or it is not a bitnet server.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise InvalidInputError(f"{url} is not a server address; it must begin with http:// or https://.")
    if api_key is not None and not api_key.isprintable():
        raise InvalidInputError("the API key holds a line break or another character that cannot be sent.")
    # Headers are latin-1 to Python; the server reads keys as UTF-8.
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}".encode().decode("latin-1")}
    try:
        with urlopen(Request(f"{url}/v1/models", headers=key), timeout=SECONDS) as answer:
            body = answer.read()
    except HTTPError as error:
        hint = "Give one with --api-key or BITNET_API_KEY." if error.code == 401 else None
        why = "requires an API key" if error.code == 401 else f"answers {error.code}"
        raise BitNetError(f"the server at {url} {why}.", hint=hint) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise BitNetError(
            f"no server answers at {url}: {reason}.", hint="Start one with 'bitnet serve', or name its address."
        ) from None
    except ValueError as error:
        raise InvalidInputError(f"{url} is not a server address: {error}.") from None
    try:
        return [{"id": entry["id"], **_state(entry["status"])} for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BitNetError(f"the server at {url} is not a bitnet server.") from None


def _state(status: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {name: status[name] for name in ("device", "running", "waiting") if name in status}
    return {"state": str(status["value"]), "bytes": int(status["bytes"]), **more}
