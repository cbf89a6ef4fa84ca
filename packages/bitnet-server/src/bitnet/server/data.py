"""Data sets answered by models on a Ray cluster: stages for Ray Data, each a pool of actors that hold a model.

::

    import ray
    from bitnet.server.data import generate

    questions = ray.data.read_json("questions.jsonl")  # with a column prompt or messages
    generate(questions, "model.gguf", actors=2, max_tokens=100).write_parquet("answers")

``ray`` comes with ``bitnet-server[data]``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray.data
from ray.exceptions import RayError

from bitnet.core import Completion, Request
from bitnet.core.errors import BitNetError, DeviceError, InvalidInputError
from bitnet.server.batch.rows import Row
from bitnet.server.http.offline import answer_rows, offline
from bitnet.server.ray import cluster
from bitnet.server.ray.engine_settings import EngineSettings

if TYPE_CHECKING:
    from ray.data import Dataset

ANSWER = {
    "text": pa.string(),
    "reasoning": pa.string(),
    "tokens": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "finish_reason": pa.string(),
    "usage": pa.struct({"prompt_tokens": pa.int32(), "cached_tokens": pa.int32(), "completion_tokens": pa.int32()}),
    "error": pa.string(),
}
"""The columns that :func:`generate` adds. Where ``error`` is not null, the others are."""
ROWS = 32
"""Rows that an actor takes at a time, and computes anew if it is lost."""


def generate(
    dataset: Dataset,
    model: str | None = None,
    *,
    actors: int = 1,
    num_cpus: int = 1,
    num_gpus: float = 0,
    load: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """A data set with the model's answers: :data:`ANSWER` has the columns that are added.

    The data set has a column ``prompt`` (text) or ``messages`` (a conversation), and may have a column ``options`` with
    options of a row, which go before those given here. An error is its row's value, and the others go on. An actor that
    is lost is replaced, and its rows are computed anew.

    Args:
        model: A file at the same path on every node, ``hf:ORG/NAME``, or None for the demo model.
        actors: Number of processes that load the model.
        num_cpus, num_gpus: What Ray reserves for each.
        load: Arguments of :func:`~bitnet.core.load_model`, such as ``max_seqs`` and ``context``.
        options: Fields of :class:`~bitnet.core.engine.GenerationOptions`, for every row.
    """
    settings = EngineSettings(model, _loading(load or {}, num_cpus, num_gpus))
    found = dataset.repartition(target_num_rows_per_block=ROWS)
    return _mapped(found, Generator, (settings, options), actors=actors, num_cpus=num_cpus, num_gpus=num_gpus)


def _loading(load: Mapping[str, Any], num_cpus: int, num_gpus: float) -> dict[str, Any]:
    return {"max_seqs": 16, "threads": None if num_gpus else num_cpus, **load}


def _mapped(dataset: Dataset, stage: type, arguments: Sequence[Any], *, actors: int, **resources: float) -> Dataset:
    """A data set through a pool of actors, each of which has two blocks at hand, so that its batch is never empty."""
    pool = ray.data.ActorPoolStrategy(
        size=actors, max_concurrent_calls_per_actor=2, max_tasks_in_flight_per_actor=4, enable_true_multi_threading=True
    )
    return dataset.map_batches(
        stage, batch_size=None, batch_format="pyarrow", compute=pool, fn_constructor_args=arguments, **resources
    )


class Generator:
    """The actor of :func:`generate`."""

    def __init__(self, settings: EngineSettings, options: Mapping[str, Any]) -> None:
        self._model, self._options = settings.load(), options

    def __call__(self, table: pa.Table) -> pa.Table:
        begun = [self._begin(row) for row in table.to_pylist()]
        answers = [_answer(one) for one in begun]
        for name, kind in ANSWER.items():
            table = table.append_column(name, pa.array([answer.get(name) for answer in answers], kind))
        return table

    def _begin(self, row: Mapping[str, Any]) -> Request | BitNetError:
        given = {name: value for name, value in (row.get("options") or {}).items() if value is not None}
        options = {**self._options, **given}
        try:
            if row.get("messages") is not None:
                return self._model.chat_stream(row["messages"], **options)
            if not isinstance(row.get("prompt"), str):
                raise InvalidInputError("the row has neither a prompt, a text, nor messages.")
            return self._model.stream(row["prompt"], **options)
        except DeviceError:  # Ray replaces this actor
            raise
        except BitNetError as error:
            return error
        except TypeError as error:  # an option that does not exist
            return InvalidInputError(str(error).replace("GenerationOptions.__init__()", "options"))


def _answer(begun: Request | BitNetError) -> dict[str, Any]:
    if isinstance(begun, BitNetError):
        return {"error": str(begun)}
    try:
        found: Completion = begun.result()
    except DeviceError:
        raise
    except BitNetError as error:
        return {"error": str(error)}
    return {
        "text": found.text,
        "reasoning": found.reasoning,
        "tokens": list(found.tokens),
        "logprobs": None if found.logprobs is None else [one.logprob for one in found.logprobs],
        "finish_reason": found.finish_reason,
        "usage": {
            "prompt_tokens": found.timings.prompt_tokens,
            "cached_tokens": found.timings.cached_tokens,
            "completion_tokens": len(found.tokens),
        },
    }


def answer_on_cluster(
    rows: Sequence[Row],
    done: Callable[[str, int, dict[str, Any]], None],
    model: str | Path | None,
    load: Mapping[str, Any],
    *,
    replicas: int,
    cpus: int | None,
    gpus: float | None,
) -> None:
    """Answer the rows of a batch on the cluster that this process is connected to.

    Args:
        done: Called with each row's id, and status and body of its answer, as they come.
        cpus, gpus: As for :func:`~bitnet.server.ray.cluster.share`.

    Raises:
        BitNetError: The cluster lacks room, a node cannot read the model, or no replica can load it.
    """
    nodes = cluster.nodes()
    num_cpus, num_gpus = cluster.share(nodes, replicas, cpus, gpus)
    file = str(model.absolute()) if isinstance(model, Path) else model
    cluster.check_room(nodes, replicas, num_cpus, num_gpus)
    cluster.check_models(nodes, [file])
    settings = EngineSettings(file, cluster.with_threads(load, num_cpus, num_gpus))
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it logs errors with tracebacks, and raises them, too
    columns = {
        "id": [row.id for row in rows],
        "path": [row.path for row in rows],
        "body": [json.dumps(row.body) for row in rows],
    }
    table = pa.table(columns)
    try:
        blocks = ray.data.from_arrow([table.slice(at, ROWS) for at in range(0, len(rows), ROWS)])
        found = _mapped(blocks, Answerer, (settings,), actors=replicas, num_cpus=num_cpus, num_gpus=num_gpus)
        for row in found.iter_rows():
            done(row["id"], row["status"], json.loads(row["body"]))
    except RayError as error:
        raise cluster.failure(error, "the replicas failed") from None


class Answerer:
    """The actor of :func:`answer_on_cluster`: the server's application, in an event loop of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._stack = ExitStack()
        parallel = settings.options["max_seqs"]
        self._app = self._stack.enter_context(offline(self._stack.enter_context(settings.load()), parallel))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="bitnet-batch", daemon=True).start()

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = [Row(row["id"], row["path"], json.loads(row["body"])) for row in table.to_pylist()]
        found: list[tuple[str, int, str]] = []

        def done(id: str, status: int, body: dict[str, Any]) -> None:
            found.append((id, status, json.dumps(body)))

        asyncio.run_coroutine_threadsafe(answer_rows(self._app, rows, done), self._loop).result()
        return pa.table({name: [one[i] for one in found] for i, name in enumerate(("id", "status", "body"))})
