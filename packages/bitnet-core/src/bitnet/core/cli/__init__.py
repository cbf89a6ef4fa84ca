"""The ``bitnet`` command line: a module for each command, and what they share.

``bitnet --help`` imports every module here, so each imports what it works with inside its functions.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import shell_complete

from bitnet.core.cli.app import cli
from bitnet.core.cli.completion import COMPLETE_VAR
from bitnet.core.cli.console import note
from bitnet.core.cli.signals import Ended, unwinding
from bitnet.core.cpu.guard import guard_model_files
from bitnet.core.errors import BitNetError
from bitnet.core.support import foreign_output
from bitnet.core.support.foreign import indented

__all__ = ["main"]


INTERRUPTED = 130
OUTPUT_CLOSED = 141


@foreign_output.kept_apart()
def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, explained in ``bitnet --help``."""
    _open_closed_streams()
    _use_utf8()
    guard_model_files()
    status = _run(list(sys.argv[1:] if args is None else args))
    try:
        sys.stdout.flush()
    except OSError:  # the failure of this very stream is being told; the interpreter would complain at its end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return status


def _run(args: list[str]) -> int:
    try:
        with unwinding():
            if instruction := os.environ.get(COMPLETE_VAR):
                return shell_complete(cli, {}, "bitnet", COMPLETE_VAR, instruction)
            with cli.make_context("bitnet", args) as ctx:
                cli.invoke(ctx)
            sys.stdout.flush()
            return 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except BitNetError as error:
        log = getattr(error, "log", "")  # a compiler's log: whole pages
        return _fail(error.message.removesuffix(f"\n{log}"), error.hint, error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "bitnet"
        return _fail(error.format_message(), f"Try '{path} --help'.", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        note("")
        return INTERRUPTED
    except Ended as signal:
        return signal.exit_code
    except BrokenPipeError:
        return OUTPUT_CLOSED
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"{where}{error.strerror or error}", None, 1)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", "This is a bug; BITNET_LOG=debug shows where it is.", 1)


def _fail(message: str, hint: str | None, status: int) -> int:
    """One line on stderr, and the traceback before it where the log level asks for everything."""
    if os.environ.get("BITNET_LOG", "").lower() == "debug":
        with suppress(OSError):
            sys.stderr.write(f"{indented(traceback.format_exc().rstrip())}\n")
    text = message if message.endswith((".", "!", "?")) else f"{message}."
    if hint:
        text += f" {hint}"
    note(f"bitnet: error: {' '.join(text.splitlines())}")
    return status


def _open_closed_streams() -> None:
    """A program may be started without a standard stream, as by ``2>&-``; the next file opened would take its place.

    An answer that cannot be written is an error, so what stands for standard output can only be read.
    """
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))


def _use_utf8() -> None:
    """Models write in every script: do not let a terminal's or a pipe's narrow encoding end the answer.

    Bytes typed that are not UTF-8 become surrogates, which a text that is tokenized must not have.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if hasattr(stream, "reconfigure"):
            encoding = stream.encoding if "PYTHONIOENCODING" in os.environ else "utf-8"
            stream.reconfigure(encoding=encoding, errors=errors)
