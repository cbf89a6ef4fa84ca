"""A forked process has its parent's memory but none of its threads, so nothing in it may wait for a thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from bitnet.core import load_model
with load_model(device="cpu", context=64, threads=2) as model:
    def answer():
        try:
            return model.generate("Hi", max_tokens=3, ignore_eos=True).tokens
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    def in_fork():
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            print(answer())
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
    in_fork()
    in_fork()
    print(answer())
    in_fork()
    print(answer())
"""

BUSY = """
import os, threading
from bitnet.core import load_model
from bitnet.core.hal.check import StepCheck
inside, go_on, check = threading.Event(), threading.Event(), StepCheck.__call__
def held(*arguments):
    inside.set()
    go_on.wait()
    check(*arguments)
StepCheck.__call__ = held
with load_model(device="cpu", context=64, threads=2) as model:
    stream = model.stream("Hi", max_tokens=3, ignore_eos=True)
    inside.wait()
    if (child := os.fork()) == 0:
        model.close()
        os._exit(7)
    go_on.set()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sum(len(chunk.tokens) for chunk in stream))
"""

STREAM = """
import os
from bitnet.core import load_model
with load_model(device="cpu", context=128, threads=2) as model:
    stream = model.stream("Hi", max_tokens=64, ignore_eos=True)
    taken = len(next(stream).tokens)
    if (child := os.fork()) == 0:
        try:
            USE
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        stream.close()
        print(stream.completion, list(stream), flush=True)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), taken + sum(len(chunk.tokens) for chunk in stream))
"""

LOCKED = """
import os, threading
from bitnet.core import load_model
with load_model(device="cpu", context=64, threads=2) as model:
    stream = model.stream("Hi", max_tokens=3, ignore_eos=True)
    with model._worker._changed:  # as a thread of the parent holds it for a moment
        child = os.fork()
        if child == 0:
            stream.close()
            del stream
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sum(len(chunk.tokens) for chunk in stream))
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


def test_a_fork_in_the_middle_of_a_step_ends() -> None:
    assert run(BUSY) == ["7 3"]


def test_a_model_that_was_used_says_so_and_one_that_was_only_loaded_works() -> None:
    *forks, before, forked, after = run(SCRIPT)
    assert forks == [before, before]
    assert before == after
    assert forked.startswith("InvalidInputError: the model was used before this process was forked.")


@pytest.mark.parametrize("use", ["next(stream)", "list(stream)", "[chunk for chunk in stream]"])
def test_a_stream_of_the_parent_says_so_in_a_fork(use: str) -> None:
    error, closed, parent = run(STREAM.replace("USE", use))
    assert error.startswith("InvalidInputError: the model was used before this process was forked.")
    assert closed == "None []"
    assert parent == "7 64"


def test_a_stream_is_closed_in_a_fork_whatever_the_parent_was_doing() -> None:
    assert run(LOCKED) == ["7 3"]
