"""A model whose engine a task steps gives the tokens of one that a thread steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from bitnet.core import ContextFullError, InvalidInputError, Model, load_model, load_model_async
from bitnet.core.support import system

QUESTIONS = ["What is 17 + 25?", "What is 8 + 5?", "Count to twelve.", "Say hello."]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_seqs": 3, "context": 512}


@pytest.fixture(scope="module")
def threaded() -> Iterator[Model]:
    with load_model(**OPTIONS) as model:
        yield model


@contextmanager
def alone() -> Iterator[None]:
    """No thread starts, as in a browser, except for the one that reads what templates' processes say."""
    began = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name != "bitnet-helper":
            raise RuntimeError(f"can't start new thread {thread.name}")
        began(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "THREADS", False)
        patch.setattr(threading.Thread, "start", start)
        yield


def run(work: Callable[[Model], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def whole() -> Any:
        with await load_model_async(**(OPTIONS | options)) as model:
            return await work(model)

    with alone():
        return asyncio.run(whole())


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("device", ["cpu", "cpu:numpy"])
def test_tokens_are_those_of_the_threaded_engine(threaded: Model, device: str) -> None:
    """More requests than sequences, greedy and sampled, with log-probabilities."""

    async def ask(model: Model) -> list[Any]:
        made = [model.chat_stream(conversation(q), max_tokens=12, seed=i, **more) for i, q, more in cases]
        return [await request for request in made]

    samples: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "logprobs": 2}
    few = QUESTIONS[:1] if device == "cpu:numpy" else QUESTIONS
    cases: list[tuple[int, str, dict[str, Any]]] = [(i, q, more) for i, q in enumerate(few) for more in ({}, samples)]
    found = run(ask, device=device)
    expected = [threaded.chat(conversation(q), max_tokens=12, seed=i, **more) for i, q, more in cases]
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    assert "42" in found[0].text


def test_chunks_come_while_other_tasks_run(threaded: Model) -> None:
    async def ask(model: Model) -> tuple[str, list[int], int]:
        turns, done = 0, False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        text, seen = "", []
        async for chunk in model.chat_stream(conversation(QUESTIONS[2]), max_tokens=40):
            text += chunk.text
            seen.append(turns)
        done = True
        await beside
        return text, seen, turns

    text, seen, _ = run(ask)
    assert text == threaded.chat(conversation(QUESTIONS[2]), max_tokens=40).text
    assert len(seen) > 1
    assert seen[-1] > seen[0]


def test_a_request_is_ended() -> None:
    async def ask(model: Model) -> tuple[str, int, str]:
        async with model.stream("Once", max_tokens=400, ignore_eos=True) as request:
            async for _ in request:
                break
        assert request.completion is not None
        dropped = model.stream("Once", max_tokens=400, ignore_eos=True)
        del dropped
        again = await model.stream("Once", max_tokens=3)
        return request.completion.finish_reason, model.load().running, again.finish_reason

    assert run(ask) == ("cancelled", 0, "length")


def test_scores_and_perplexity(threaded: Model) -> None:
    """Beside generations and each other; the scores are those of the threaded engine, bit for bit."""
    texts = ["The ship sailed to the island.", "What is 17 + 25?", "Once there was a fox, who lived in a wood."]
    long = " ".join(texts * 4)

    async def ask(model: Model) -> tuple[list[Any], list[Any], Any]:
        request = model.stream("Once", max_tokens=30, ignore_eos=True)
        scores = await asyncio.gather(*(model.score_async(text, start=1 + i) for i, text in enumerate(texts)))
        chunks = [one async for one in model.perplexity_async(long, context=16)]
        return scores, chunks, (await request).tokens

    scores, chunks, tokens = run(ask)
    for i, text in enumerate(texts):
        np.testing.assert_array_equal(scores[i], threaded.score(text, start=1 + i))
    assert len(chunks) > 2
    assert chunks == list(threaded.perplexity(long, context=16))
    assert tokens == threaded.generate("Once", max_tokens=30, ignore_eos=True).tokens


def test_a_text_that_cannot_be_scored() -> None:
    async def ask(model: Model) -> None:
        with pytest.raises(InvalidInputError, match="start"):
            await model.score_async("a b", start=0)
        with pytest.raises(ContextFullError):
            await model.score_async([1] * 600)
        with pytest.raises(InvalidInputError, match="one chunk needs 64"):
            await anext(model.perplexity_async("a b", context=64))
        with pytest.raises(InvalidInputError, match="they must be several"):
            await model.embed_async("a b")
        assert len(await model.score_async([1, 2, 3])) == 2
        assert model.load().running == 0

    run(ask)


@pytest.mark.parametrize("device", ["cpu", "cpu:numpy"])
def test_vectors(threaded: Model, device: str) -> None:
    """Tasks compute at the same time, in several steps, beside a generation."""
    texts = ["a fox", "The ship sailed to the island. " * 40, "What is 17 + 25?", "a fox"]

    async def ask(model: Model) -> tuple[list[Any], Any]:
        request = model.stream("Once", max_tokens=8, ignore_eos=True)
        several = [model.embed_async(texts), model.embed_async(texts[2:], pooling="last", normalize=False)]
        return list(await asyncio.gather(*several)), (await request).tokens

    (first, second), tokens = run(ask, device=device, step_tokens=64)
    with load_model(**OPTIONS | {"device": device, "step_tokens": 64}) as model:
        np.testing.assert_array_equal(first, model.embed(texts))
        np.testing.assert_array_equal(second, model.embed(texts[2:], pooling="last", normalize=False))
    np.testing.assert_array_equal(first[0], first[3])
    assert tokens == threaded.generate("Once", max_tokens=8, ignore_eos=True).tokens


def test_vectors_and_scores_of_a_threaded_model(threaded: Model) -> None:
    """A task may ask a model that threads step, too."""

    async def ask() -> tuple[Any, Any]:
        return await asyncio.gather(threaded.embed_async(["a fox"]), threaded.score_async("a fox in a wood"))

    vectors, scores = asyncio.run(ask())
    np.testing.assert_array_equal(vectors, threaded.embed(["a fox"]))
    np.testing.assert_array_equal(scores, threaded.score("a fox in a wood"))


def test_a_waiting_thread_is_refused() -> None:
    async def ask(model: Model) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: model.generate("a"),
            lambda: model.score("a b c"),
            lambda: next(model.perplexity("a " * 80, context=16)),
            lambda: model.embed(["a"]),
            lambda: next(model.stream("a")),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError, match=r"await model\.stream"):
                call()
        await model.stream("a", max_tokens=1)

    run(ask)


def test_a_closed_model_ends_its_requests() -> None:
    async def whole() -> None:
        model = await load_model_async(**OPTIONS)
        request = model.stream("Once", max_tokens=400, ignore_eos=True)
        await anext(request)
        model.close()
        with pytest.raises(InvalidInputError, match="closed"):
            async for _ in request:
                pass
        with pytest.raises(InvalidInputError, match="closed"):
            model.stream("a")

    with alone():
        asyncio.run(whole())


def test_the_event_loop_ends_first() -> None:
    """The task is cancelled in the middle of its work; the model closes, and gives the reason."""

    async def begin() -> Model:
        model = await load_model_async(**OPTIONS)
        kept.append(model.stream("Once", max_tokens=400, ignore_eos=True))
        await anext(kept[0])
        return model

    async def ask(model: Model) -> None:
        model.stream("a")

    kept: list[Any] = []
    with alone():
        model = asyncio.run(begin())
    with pytest.raises(InvalidInputError, match="event loop"):
        asyncio.run(ask(model))
    model.close()


def test_load_model_needs_threads() -> None:
    with alone(), pytest.raises(InvalidInputError, match="load_model_async"):
        load_model(**OPTIONS)


def test_one_failed_device_is_replaced(threaded: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests go on with the other replica."""
    from bitnet.core.errors import DeviceLostError
    from bitnet.core.hal import CheckedExecutable

    async def ask(model: Model) -> tuple[list[Any], tuple[str, ...]]:
        async def arrival(self: CheckedExecutable, progress: object = None) -> None:
            if self is model._replicas[0].executable:
                raise DeviceLostError("it is gone.", device=self.info.name)

        monkeypatch.setattr(CheckedExecutable, "arrival", arrival)
        made = [model.chat_stream(conversation(q), max_tokens=8) for q in QUESTIONS]
        return [(await request).tokens for request in made], model.load().lost

    tokens, lost = run(ask, device="cpu:numpy,cpu", context=256)
    assert lost == ("cpu:numpy",)
    assert tokens == [threaded.chat(conversation(q), max_tokens=8).tokens for q in QUESTIONS]
