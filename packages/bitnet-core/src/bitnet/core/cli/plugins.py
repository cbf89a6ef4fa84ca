"""Commands that other packages add to ``bitnet``: entry points in the group ``bitnet.commands``.

An entry point has the command's name and refers to a ``click.Command``. It is loaded when the command runs and for the
help, so its module should import heavy dependencies inside its functions, as ours do.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint

import click

from bitnet.core.cli.narrow import fits_narrow
from bitnet.core.errors import BitNetError
from bitnet.core.support.entry_points import entry_points

GROUP = "bitnet.commands"


@cache
def found() -> dict[str, EntryPoint]:
    """The entry points of installed packages, by command name. Of two with the same name, the first is used."""
    return {point.name: point for _, _, point in reversed(tuple(entry_points(GROUP)))}


@cache
def load(point: EntryPoint) -> click.Command:
    """Load the command. If that fails, return a command that reports the error, so that `bitnet --help` still works."""
    try:
        command = point.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"{point.value} is not a click.Command")
    except Exception as error:
        return _broken(point, error)
    fits_narrow(command)
    return command


def _broken(point: EntryPoint, error: Exception) -> click.Command:
    package = point.dist.name if point.dist is not None else point.value
    message = f"the command {point.name} of {package} cannot be loaded: {type(error).__name__}: {error}"

    def fail() -> None:
        raise BitNetError(message, hint=f"Reinstall {package}.") from error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(point.name, callback=fail, short_help=f"(broken: {error})", context_settings=settings)
