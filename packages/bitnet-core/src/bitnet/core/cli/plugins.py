"""Commands that other packages add to ``bitnet``: entry points in the group ``bitnet.commands``.

An entry point has the command's name and refers to a ``click.Command``. It is loaded when the command runs and for the
help, so its module should import heavy dependencies inside its functions, as ours do.
"""

from __future__ import annotations

from functools import cache

import click

from bitnet.core.cli.narrow import fits_narrow
from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.support.entry_points import EntryPoint, entry_points
from bitnet.core.support.requirement import unmet
from bitnet.core.support.system import core_version

GROUP = "bitnet.commands"
OURS = dict.fromkeys(("batch", "bench-serve", "launch", "ps", "serve", "web"), "bitnet-server")
"""The commands of our own other packages, and the package of each."""


@cache
def found() -> dict[str, EntryPoint]:
    """The entry points of installed packages, by command name. Of two with the same name, the first is used."""
    return {point.name: point for point in reversed(tuple(entry_points(GROUP)))}


@cache
def load(point: EntryPoint) -> click.Command:
    """Load the command. If that fails, return a command that reports the error, so that `bitnet --help` still works."""
    if versions := unmet(point.requires):
        needs = f"{point.distribution} {point.version} needs bitnet-core {versions}, but {core_version()} is installed"
        return _broken(point, needs, f"pip install --upgrade bitnet-core {point.distribution}", needs)
    try:
        command = point.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"{point.value} is not a click.Command")
    except Exception as error:
        return _broken(point, f"{type(error).__name__}: {error}", f"Reinstall {point.distribution}.", str(error), error)
    fits_narrow(command)
    return command


def absent(name: str) -> click.Command | None:
    """A command that reports which package has to be installed; None if none of ours has a command of this name."""
    package = OURS.get(name)
    if package is None:
        return None
    message = f"the command {name} is in {package}, which is not installed."
    return _failing(name, InvalidInputError(message, hint=f"pip install {package}"))


def _broken(point: EntryPoint, why: str, hint: str, short: str, cause: Exception | None = None) -> click.Command:
    """A command that reports why another cannot be loaded; ``short`` says it in the list of commands."""
    error = BitNetError(f"the command {point.name} of {point.distribution} cannot be loaded: {why}", hint=hint)
    error.__cause__ = cause
    return _failing(point.name, error, f"(broken: {short})")


def _failing(name: str, error: BitNetError, short_help: str | None = None) -> click.Command:
    """A command that raises the error, whatever its arguments are."""

    def fail() -> None:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=fail, short_help=short_help, add_help_option=False, context_settings=settings)
