"""Runs a tool: an error that its user can mend ends it with a message, without a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Run a tool, and end with its status; of an error of bitnet's or the system's only the message is told."""
    try:
        raise SystemExit(main())
    except Exception as error:
        from bitnet.core.errors import BitNetError  # measure_load.py measures how long the first import takes

        if not isinstance(error, (BitNetError, OSError)):
            raise
        print(f"{Path(sys.argv[0]).stem}: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code if isinstance(error, BitNetError) else 1) from None


def positive(text: str) -> int:
    """The value of an argument of which there must be at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few: the least is 1")
    return value
