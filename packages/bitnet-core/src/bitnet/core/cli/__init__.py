"""The ``bitnet`` command line: one module for each command, and shared helpers.

``bitnet --help`` imports every module here, so each imports its heavy dependencies inside its functions.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import click
from click.shell_completion import shell_complete

import bitnet.core.cpu
from bitnet.core.cli.app import cli
from bitnet.core.cli.completion import COMPLETE_VAR
from bitnet.core.cli.console import note
from bitnet.core.cli.signals import Ended, unwinding
from bitnet.core.cpu.guard import guard_model_files
from bitnet.core.errors import BitNetError
from bitnet.core.support import env, foreign_output
from bitnet.core.support.foreign import indented

__all__ = ["main"]


INTERRUPTED = 130
OUTPUT_CLOSED = 141
NATIVE = Path(bitnet.core.cpu.__path__[0], "_native")
"""Folder of the native library, if the package was built with one."""
NO_THREAD = "can't start new thread"
"""How Python's RuntimeError says it."""


@foreign_output.kept_apart()
def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, explained in ``bitnet --help``."""
    _open_closed_streams()
    _use_utf8()
    arguments = list(sys.argv[1:] if args is None else args)
    _spare_numpy_threads(arguments)
    guard_model_files()
    status = _run(arguments)
    for stream in (sys.stdout, sys.stderr):
        _drop_unwritable(stream)
    return status


def _spare_numpy_threads(arguments: Sequence[str]) -> None:
    """Keep numpy's OpenBLAS from starting threads when it is imported, unless the user wants them or numpy computes the
    model: ``cpu:numpy`` is asked for, or there is no native library.

    They spin before they sleep, on processors that are busy loading a model.
    """
    asked = (argument.lower() for argument in (*arguments, env.text("BITNET_DEVICE")))
    if any(NATIVE.glob("*")) and not any("cpu:numpy" in argument for argument in asked):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _drop_unwritable(stream: TextIO) -> None:
    """Discard the rest of a stream that cannot be written to.

    A failure of standard output has been reported, and what is for the user may be lost. At exit, the interpreter would
    try to write the rest again, and end with status 120.
    """
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


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
        log = getattr(error, "log", "")  # a compiler's log, pages long
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
    except MemoryError:
        return _fail("there is not enough memory.", "Use a smaller model or a shorter context (-c).", 1)
    except Exception as error:
        if isinstance(error, RuntimeError) and NO_THREAD in str(error):
            hint = "Raise the limit of processes (ulimit -u; of a container, --pids-limit), or free memory."
            return _fail("the system has no room for another thread.", hint, 1)
        return _fail(f"{type(error).__name__}: {error}", "This is a bug; BITNET_LOG=debug shows where it is.", 1)


def _fail(message: str, hint: str | None, status: int) -> int:
    """Print one line on stderr, after the traceback if the log level is debug."""
    if os.environ.get("BITNET_LOG", "").lower() == "debug":
        with suppress(OSError):
            sys.stderr.write(f"{indented(traceback.format_exc().rstrip())}\n")
    text = message if message.endswith((".", "!", "?")) else f"{message}."
    if hint:
        text += f" {hint}"
    note(f"bitnet: error: {' '.join(line.strip() for line in text.splitlines())}")
    return status


def _open_closed_streams() -> None:
    """Open any standard stream that is closed, as by ``2>&-``; otherwise the next file opened would take its place.

    The replacement for standard output is opened for reading only, so that writing an answer to it is an error.
    """
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))


def _use_utf8() -> None:
    """Use UTF-8 for all standard streams: models write in every script, and an encoding error would end the answer.

    Input bytes that are not UTF-8 become surrogates; text to be tokenized must not contain these.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if hasattr(stream, "reconfigure"):
            encoding = stream.encoding if "PYTHONIOENCODING" in os.environ else "utf-8"
            stream.reconfigure(encoding=encoding, errors=errors)
