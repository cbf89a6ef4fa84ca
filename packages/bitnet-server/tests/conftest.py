"""A server in a thread, over the demo model or over a model whose answers a test writes."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shlex
import shutil
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from bitnet.core import Model, load_model
from bitnet.core.engine.bursts import Bursts
from bitnet.core.engine.engine import Engine
from bitnet.core.engine.scheduler import Plan
from bitnet.core.engine.wait import Result
from bitnet.core.hal import Step
from bitnet.server.http.app import App
from bitnet.server.http.connection import Connection
from bitnet.server.http.listening import IDLE_SECONDS
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.service import Service, Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.state import State

MAX_SEQS = 4
LONG_CONTEXT = 65_536  # instructions and tools of Claude Code take some 37,000 of the demo model's tokens
Script = Callable[[str], str]
PAGES = Path(__file__).resolve().parents[3] / "docs" / "clients"
PAGES_URL = "http://127.0.0.1:8080"  # of the server, on the pages


class _Idle:
    """An executable that computes nothing."""

    def start(self, step: Step, count: int) -> None: ...

    def go_on(self, count: int) -> None: ...


IDLE: Any = _Idle()


class ScriptedEngine(Engine):
    """An engine that says what a test has it say; the device computes nothing.

    Attributes:
        script: The answer to a prompt's text.
        prompts: The latest prompts.
        seconds: What a step takes at least.
        failure: What the next step raises.
    """

    script: Script
    prompts: deque[str]
    seconds = 0.0
    failure: BaseException | None = None
    _answers: dict[int, list[int]]
    _plan: Plan

    def _prepared(self, plan: Plan) -> tuple[Step, bool]:
        self._plan = plan
        return super()._prepared(plan)

    def _begin(self, bursts: Bursts) -> bool:
        bursts._executable = IDLE
        return bursts.begin()

    def _compute(self, step: Step, bursts: Bursts, wanted: bool) -> Result:
        plan, repeat = self._plan, bursts._begun.popleft()
        bursts.taken += repeat
        if self.failure is not None:
            failure, self.failure = self.failure, None  # else its frames would hold this engine, and it them
            raise failure
        if self.seconds:
            threading.Event().wait(self.seconds)
        rows = [item.sequence for item in plan.work if item.rows]
        tokens = np.array([[self._next(s, k) for s in rows] for k in range(repeat)], np.int32)
        logits = np.full((len(rows), self.preparer.vocab_size), -20, np.float32)
        if rows:
            logits[np.arange(len(rows)), tokens[0]] = 20
        here = {sequence.number for sequence in self._scheduler.sequences}
        for number in self._answers.keys() - here:  # ended or cancelled
            del self._answers[number]
        return Result(tokens.reshape(repeat, len(rows)), logits, None)

    def _next(self, sequence: Any, ahead: int) -> int:
        tokenizer = self.tokenizer
        if sequence.number not in self._answers:
            self.prompts.append(tokenizer.decode(sequence._prompt, skip_special=False))
            answer = self.script(self.prompts[-1])
            self._answers[sequence.number] = tokenizer.encode(answer, add_special=False)
        answer_ids = self._answers[sequence.number]
        at = sequence._generated + ahead
        return answer_ids[at] if at < len(answer_ids) else min(self.preparer._eos)

    tokenizer: Any


def _scripted(model: Model, script: Script | str) -> ScriptedEngine:
    """Have a model's engine say what ``script`` makes of a prompt."""
    engine: Any = model._worker.engine
    engine.preparer.lookup = False  # scripts repeat themselves: with look-up, a step would give many of their tokens
    engine.__class__ = ScriptedEngine
    engine._slots, engine._max_logprobs = None, -1  # all is chosen from logits
    engine.script = (lambda _: script) if isinstance(script, str) else script
    engine.tokenizer, engine._answers, engine.prompts = model.tokenizer, {}, deque(maxlen=100)
    return engine  # type: ignore[no-any-return]


class Running:
    """A server that runs, and a client for it."""

    def __init__(self, url: str, app: App) -> None:
        self.url, self.app, self.state = url, app, app.state
        self.client = httpx.Client(base_url=url, timeout=60)

    @property
    def service(self) -> Service:
        """The first model, loaded."""
        service = self.state.pool.models[0].service
        assert service is not None
        return service

    @property
    def model(self) -> Model:
        model = self.service.model
        assert isinstance(model, Model)
        return model

    def chat(self, content: str = "What is 17 + 25?", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def _running(
    model: Model | None,
    *,
    sources: Sequence[Source] = (),
    catalog: Catalog | None = None,
    names: tuple[str, ...] = (),
    local: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    """Serve a model, or those of ``sources`` and of a catalog, at a free port of this machine."""
    if model is not None:
        sources = [Source(names or (model.path.stem,), model.path, lambda: model, reloads=False)]
    state = State(sources, Settings(max_seqs=MAX_SEQS, **settings), catalog)
    state.pool.open()
    listener = socket.create_server(("127.0.0.1", 0))
    app = App(state, local=local)
    config = uvicorn.Config(
        app, http=Connection, log_config=None, access_log=False, server_header=False, timeout_keep_alive=IDLE_SECONDS
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    found = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        yield found
    finally:
        found.client.close()
        server.should_exit = server.force_exit = True
        thread.join(30)
        listener.close()
        state.close()
        gc.unfreeze()  # what a server excluded from searches for cycles
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def demo_model() -> Iterator[Model]:
    with load_model(device="cpu", max_seqs=MAX_SEQS, threads=2) as model:
        yield model


@pytest.fixture(scope="session")
def long_file(demo_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with room for an agent's instructions, since its file says so."""
    data = bytearray(demo_model.path.read_bytes())
    key = b"bitnet-b1.58.context_length"
    at = data.index(key) + len(key) + 4  # behind the value's type
    data[at : at + 4] = LONG_CONTEXT.to_bytes(4, "little")
    file = tmp_path_factory.mktemp("model") / "long.gguf"
    file.write_bytes(data)
    return file


class Elsewhere:
    """A server over the demo model that runs already, and a client for it.

    Attributes:
        model: The demo model in this process, to compare with.
    """

    def __init__(self, url: str, model: Model) -> None:
        self.url, self.model = url, model
        self.client = httpx.Client(base_url=url, timeout=60)


@pytest.fixture(scope="session")
def demo(demo_model: Model) -> Iterator[Running | Elsewhere]:
    """A server over the demo model: that at ``BITNET_TEST_URL``, or one of this process."""
    if url := os.environ.get("BITNET_TEST_URL"):
        yield Elsewhere(url, demo_model)
        return
    with _running(demo_model, names=("demo",)) as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``BITNET_TEST_URL``, only tests that need no other server are run."""
    if "BITNET_TEST_URL" in os.environ:
        items[:] = [item for item in items if _runs_elsewhere(item)]


def _runs_elsewhere(item: pytest.Item) -> bool:
    used = set(getattr(item, "fixturenames", ()))
    return "demo" in used and not used & {"running", "scripted"}


@pytest.fixture(scope="session")
def shown() -> Callable[..., str]:
    """``shown(name, url)``: the block of ``docs/clients`` that is marked with the name; ``url`` is the server's."""
    marked = re.compile(r"^<!-- run: (\S+) in \S+ -->\n+```\w+\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    pages = "\n".join(file.read_text(encoding="utf-8") for file in sorted(PAGES.glob("*.md")))
    found: dict[str, str] = dict(marked.findall(pages))

    def block(name: str, url: str = "") -> str:
        text = found[name]
        assert not url or PAGES_URL in text
        return text.replace(PAGES_URL, url)

    return block


@pytest.fixture(scope="session")
def shell(require_device: Callable[[str, str | None], None]) -> Callable[..., list[str]]:
    """``shell(text, *words)``: the command that runs a shell's lines, the last of them with these words at its end.

    The shell finds ``bitnet`` where this Python is, and ``programs`` in the folder of that name.
    """
    bash = (os.name == "posix" and shutil.which("bash")) or ""
    require_device("bash", None if bash else "a POSIX shell is needed")

    def command(text: str, *words: str, programs: Path | str = "") -> list[str]:
        path = os.pathsep.join(filter(None, (str(programs), str(Path(sys.executable).parent))))
        return [bash, "-euc", f'PATH={shlex.quote(path)}:$PATH\n{text.rstrip()} "$@"', "bash", *words]

    return command


@pytest.fixture
def script_model() -> Iterator[Model]:
    """A model of its own, for ``scripted``."""
    with load_model(device="cpu", max_seqs=MAX_SEQS, threads=1, max_queue=64) as model:
        yield model


@pytest.fixture(scope="session")
def running() -> Callable[..., AbstractContextManager[Running]]:
    """Serves a model, with :class:`Settings` as keyword arguments, inside a ``with``."""
    return _running


@pytest.fixture(scope="session")
def scripted() -> Callable[[Model, Script | str], ScriptedEngine]:
    """Has a model's engine say what a script makes of a prompt."""
    return _scripted
