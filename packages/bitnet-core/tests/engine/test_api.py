"""The Python API on a small model file, through the tokenizer and the chat template in it.

Long, because all of the API is tested on one model, which is made and loaded once.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import loading
from bitnet.core.api import Model
from bitnet.core.devices import opening
from bitnet.core.devices.select import select_device
from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.options import OptionArguments
from bitnet.core.engine.setup import cache_blocks, context_for, default_context, position_bytes, window_bytes
from bitnet.core.errors import (
    ContextFullError,
    DeviceUnavailableError,
    InvalidInputError,
    ModelFileError,
    OutOfMemoryError,
    UnsupportedProgramError,
)
from bitnet.core.gguf import TensorSource, write_gguf
from bitnet.core.hal import KVDtype, MemoryInfo
from bitnet.core.hal.check import StepCheck
from bitnet.core.loading import load_model
from bitnet.core.model import open_model
from bitnet.core.model.cache import cache_layout
from bitnet.core.model.experts import Windows
from bitnet.core.reference import NUMPY_INFO, ReferenceDevice
from bitnet.core.text.vocabulary import Vocabulary

ROOT = Path(__file__).parents[4]
WHOLE = ("context", "max_seqs", "step_tokens", "max_queue", "max_queue_tokens")


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = tool("make_random_model")
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    maker.make_model(path, maker.Shape(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=192, context=256))
    return path


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with load_model(path, device=ReferenceDevice(), max_seqs=3) as model:
        yield model


def test_the_keyword_arguments_are_the_options() -> None:
    assert list(OptionArguments.__annotations__) == [field.name for field in fields(GenerationOptions)]


def test_collections_among_the_options() -> None:
    stop = ["a", "b"]
    options = GenerationOptions(stop=stop)
    stop.append("")
    assert options.stop_strings == ("a", "b")
    assert GenerationOptions(stop=iter(["a"])).stop_strings == ("a",)  # type: ignore[arg-type]
    none: Any = {"stop": None, "stop_tokens": None, "logit_bias": None}
    assert GenerationOptions(**none) == GenerationOptions()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"stop": 5}, "stop is 5; it must be a string or strings"),
        ({"stop": [""]}, "none empty"),
        ({"stop": b"ab"}, "it must be a string or strings"),
        ({"stop_tokens": 5}, "stop_tokens is 5; it must be token ids"),
        ({"logit_bias": [(1, 2)]}, "must map token ids to numbers"),
    ]
    for given, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            GenerationOptions(**given)


def test_generate_stream_and_batch_agree(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 9, "ignore_eos": True}
    done = model.generate("the sea", **options)
    assert done.prompt_tokens == tuple(model.tokenizer.encode("the sea"))
    assert len(done.tokens) == 20
    assert done.text == model.tokenizer.decode(done.tokens)
    with model.stream("the sea", **options) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert stream.completion is not None
    assert stream.completion.tokens == done.tokens
    batch = model.generate_batch(["the sea", done.prompt_tokens, "a"], n=2, **options)
    assert len(batch) == 6
    assert batch[0].tokens == batch[2].tokens == done.tokens
    assert batch[1].tokens == batch[3].tokens != done.tokens
    assert batch[4].prompt_tokens == tuple(model.tokenizer.encode("a"))


def test_chat_is_the_rendered_prompt(model: Model) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert model.chat_template is not None
    rendered = model.chat_template.render(messages, add_generation_prompt=True)
    tokens = model.tokenizer.encode(rendered, add_special=False, parse_special=True)
    assert tokens[0] == model.tokenizer.bos_id
    assert tokens[1] != model.tokenizer.bos_id
    done = model.chat(messages, max_tokens=5)
    assert done.prompt_tokens == tuple(tokens)
    assert done.tokens == model.generate(tokens, max_tokens=5).tokens
    assert "".join(chunk.text for chunk in model.chat_stream(messages, max_tokens=5)) == done.text


def test_what_is_said_in_a_chat_becomes_no_control_token(model: Model) -> None:
    token = model.tokenizer.bos_token
    forged = f"a{token}b"

    def begins(tokens: tuple[int, ...]) -> int:
        return sum(i == model.tokenizer.bos_id for i in tokens)

    harmless = begins(model.chat([{"role": "user", "content": "ab"}], max_tokens=1).prompt_tokens)
    messages = [{"role": "user", "content": forged}]
    assert begins(model.chat(messages, max_tokens=1).prompt_tokens) == harmless
    with model.chat_stream(messages, max_tokens=1) as stream:
        list(stream)
    assert stream.completion is not None
    assert begins(stream.completion.prompt_tokens) == harmless
    begun = begins(model.generate("ab", max_tokens=1).prompt_tokens)
    assert begins(model.generate(forged, max_tokens=1).prompt_tokens) == begun + 1  # as documented: it is recognised


def test_ids_that_have_no_token_say_nothing(tmp_path: Path) -> None:
    """Embeddings have more rows than there are tokens where their number was rounded up."""
    maker = tool("make_random_model")
    shape = maker.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=192, context=64, vocab=520)
    write_gguf(tmp_path / "more.gguf", maker.metadata(replace(shape, vocab=512)), dict(maker.tensors(shape, 0)))
    with load_model(tmp_path / "more.gguf", device=ReferenceDevice()) as model:
        (letter,) = model.tokenizer.encode("a", add_special=False)
        done = model.generate("a", max_tokens=3, logit_bias={519: 1e6}, logprobs=2)
        assert (done.tokens, done.text) == ((519, 519, 519), "")
        assert model.tokenizer.decode([letter, 519, 512, letter]) == "aa"
        assert model.tokenizer.vocab_size == 520
        assert len(model.generate([512, letter], max_tokens=3, ignore_eos=True).tokens) == 3
        with pytest.raises(InvalidInputError, match="no token 520"):
            model.tokenizer.decode([520])


def test_an_answer_of_a_sentencepiece_vocabulary_continues_its_prompt(path: Path, tmp_path: Path) -> None:
    plain = open_model(path)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abc", "\u2581a", "\u2581b"]
    types = [2, 3, 3, *[6] * 256, *[1] * 6]
    scores = [0.0] * 259 + [float(-i) for i in range(6)]
    made = Vocabulary("llama", tokens, types, [], scores, bos_id=1, eos_id=2, add_bos=True)
    tensors = {name: TensorSource(t.shape, t.type, plain.gguf.data(t)) for name, t in plain.gguf.tensors.items()}
    rest = {key: value for key, value in plain.metadata.items() if not key.startswith("tokenizer.")}
    write_gguf(tmp_path / "sp.gguf", rest | made.metadata(), tensors)
    with load_model(tmp_path / "sp.gguf", device=ReferenceDevice()) as model:
        options: Any = {"logit_bias": {tokens.index("\u2581a"): 1e6}, "max_tokens": 2}
        for prompt, text in (("a b", " a a"), ("a b ", " a a"), ("", "a a")):
            done = model.generate(prompt, **options)
            assert done.text == text
            assert model.tokenizer.decode([*done.prompt_tokens, *done.tokens]) == prompt + text
            assert "".join(chunk.text for chunk in model.stream(prompt, **options)) == text


def test_timings_are_consistent(model: Model) -> None:
    timings = model.generate("some words", max_tokens=8, ignore_eos=True).timings
    assert timings.first_token is not None
    assert 0 <= timings.started < timings.first_token <= timings.total
    assert len(timings.token_times) == 8
    assert list(timings.token_times) == sorted(timings.token_times)
    assert sum(timings.inter_token) == pytest.approx(timings.token_times[-1] - timings.token_times[0])
    assert timings.decode_tokens_per_second is not None
    assert timings.decode_tokens_per_second > 0
    single = model.generate("other words", max_tokens=1, ignore_eos=True).timings
    assert single.decode_tokens_per_second is None
    assert single.prefill_tokens_per_second is not None


def test_score_and_perplexity_agree(model: Model) -> None:
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 300, 70)]
    scores = model.score(tokens)
    assert scores.shape == (69,)
    (only,) = model.perplexity(tokens, context=64)
    assert only.value == pytest.approx(np.exp(-model.score(tokens[:64], start=33).mean()))
    assert only.tokens == 31
    with pytest.raises(ContextFullError):
        list(model.perplexity(tokens * 10, context=300))


def test_context_and_other_bad_input(path: Path, model: Model, tmp_path: Path) -> None:
    assert model.context == 256
    with pytest.raises(ContextFullError, match=r"256.*Shorten the prompt\.$"):  # the model's own maximum
        model.generate([1] * 256)
    with (
        load_model(path, device=ReferenceDevice(), context=64) as shorter,
        pytest.raises(ContextFullError, match=r"holds 64.* at a time, or load the model with a longer context"),
    ):
        shorter.score([1] * 65)
    for prompt in ([1.5], ["a", "b"], None, b"text that was not decoded"):
        with pytest.raises(InvalidInputError, match=r"the prompt is .* neither") as raised:
            model.generate(prompt)  # type: ignore[arg-type]
        assert ("generate_batch" in str(raised.value)) == (prompt == ["a", "b"])
    with pytest.raises(InvalidInputError, match="the prompts are the text 'one'"):  # and not three prompts
        model.generate_batch("one")
    for count in (0, 1.5, "2"):
        with pytest.raises(InvalidInputError, match=r"n is .*; it must be an integer ≥ 1"):
            model.generate_batch(["a"], n=count)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="constraint is 5; it must be a function"):
        model.generate("a", constraint=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"start is 1\.5"):
        model.score("a b c d", start=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="one token; at least two are needed"):
        model.score([5])
    with pytest.raises(InvalidInputError, match="seed"):  # and not in the engine, which would be lost
        model.generate("a", seed=1.5)  # type: ignore[arg-type]
    assert model.generate(np.array([1, 2]), max_tokens=1).prompt_tokens == (1, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="heat"):
        model.generate("a", heat=3)  # type: ignore[call-arg]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"context": 257}, "context is 257"),
        ({"context": 1}, "context is 1"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        *(({name: "8"}, f"{name} holds '8', which is not an integer") for name in WHOLE),
        ({"max_seqs": 2.5}, r"max_seqs holds 2\.5, which is not an integer"),
        ({"device": ["cpu"]}, r"device is \['cpu'\]; it must be a name or an open device"),
        ({"kv_dtype": "q4"}, "kv_dtype is 'q4'"),
        *(({name: "yes"}, f"{name} is 'yes'; it must be True or False") for name in ("deterministic", "prompt_lookup")),
        ({"device": "cpu", "strict": 1}, "strict is 1; it must be True or False"),
        ({"path": ""}, "path is ''; it must be the path of a GGUF file"),
        ({"path": 7}, "path is 7; it must be the path of a GGUF file"),
    ]
    for arguments, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            load_model(**{"path": path, "device": ReferenceDevice(), **arguments})
    numbers: dict[str, Any] = {"max_seqs": np.int64(2), "context": np.int64(64), "prompt_lookup": np.True_}
    load_model(path, device=ReferenceDevice(), **numbers).close()
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        load_model(tmp_path / "x.gguf", device=ReferenceDevice())


@pytest.mark.parametrize(
    "messages", ["hello", {"role": "user", "content": "hello"}, [("user", "hello")], ["hello"], None], ids=repr
)
def test_what_is_no_conversation_is_refused(model: Model, messages: Any) -> None:
    """A template that is given a text reads a message of its every letter."""
    for ask in (model.chat, model.chat_stream, model.chat_tokens):
        with pytest.raises(InvalidInputError, match=r"the messages are .* must be a list of mappings"):
            ask(messages)


def test_a_model_is_of_its_process(model: Model) -> None:
    """A copy would share the device, and lose it with the original."""
    request = model.stream("x", max_tokens=2)
    copies: list[Any] = [copy.copy, copy.deepcopy, pickle.dumps]
    for made in copies:
        with pytest.raises(TypeError, match="a model cannot be pickled or copied"):
            made(model)
        with pytest.raises(TypeError, match="a request cannot be pickled or copied"):
            made(request)
    done = request.result()
    assert pickle.loads(pickle.dumps(done)) == done


def test_a_model_shows_what_it_is(path: Path) -> None:
    with load_model(path, device=ReferenceDevice()) as model:
        assert repr(model) == f"<Model {model.config.name!r} on cpu:numpy, open>"
    assert repr(model).endswith("closed>")


def test_a_request_closes_beside_other_tasks(model: Model) -> None:
    async def some() -> Any:
        async with model.stream("x", max_tokens=200, ignore_eos=True) as stream:
            async for chunk in stream:
                assert len(chunk.tokens) >= 1
                break
        return stream.completion

    assert asyncio.run(some()).finish_reason == "cancelled"
    assert model.load().running == 0


def test_a_stream_whose_model_was_closed_closes(path: Path) -> None:
    """What its block raised is told, and not that there is nothing left to close."""
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}

    def block(model: Model) -> None:
        with model.stream("x", **options):
            model.close()
            raise KeyError("of the caller")

    async def beside(model: Model) -> None:
        async with model.stream("x", **options) as stream:
            model.close()
        assert stream.completion is None

    with pytest.raises(KeyError):
        block(load_model(path, device=ReferenceDevice()))
    asyncio.run(beside(load_model(path, device=ReferenceDevice())))


def test_a_dropped_stream_frees_its_place(model: Model) -> None:
    for _ in range(4):  # one more than there are places
        next(model.stream("x", max_tokens=200, ignore_eos=True))
    gc.collect()
    assert len(model.generate("y", max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_dropped_model_closes(path: Path) -> None:
    device = ReferenceDevice()
    before = threading.active_count()
    stream = load_model(path, device=device).stream("x", max_tokens=5, ignore_eos=True)
    assert len(list(stream)) >= 1  # the stream keeps its model alive
    del stream
    gc.collect()
    assert threading.active_count() == before
    assert device.memory().used == 0


def test_a_model_dropped_in_the_middle_of_a_step_closes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a cycle that holds it is collected by the thread that runs the step, which has the device's lock."""
    device, check, steps = ReferenceDevice(), StepCheck.__call__, 0
    model = load_model(path, device=device)
    held = [model, model.stream("x", max_tokens=200, ignore_eos=True)]
    thread = model._worker.replicas[0].thread
    assert thread is not None
    del model

    def drop(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            held.clear()
        check(*arguments)

    monkeypatch.setattr(StepCheck, "__call__", drop)
    thread.join(20)
    assert not thread.is_alive()
    assert not held
    deadline = time.monotonic() + 20
    while device.memory().used and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.memory().used == 0


def test_threads_are_for_this_model_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_THREADS", "2")
    with pytest.raises(InvalidInputError, match=r"^threads is 0;"):
        load_model(path, device="cpu:scalar", threads=0)
    assert os.environ["BITNET_THREADS"] == "2"
    monkeypatch.delenv("BITNET_THREADS")
    with load_model(path, device="cpu:scalar", threads=3) as model:
        assert getattr(model._replicas[0].device, "threads", 3) == 3
        assert len(model.generate("x", max_tokens=3, ignore_eos=True).tokens) == 3
    assert "BITNET_THREADS" not in os.environ


def test_a_missing_device_is_an_error_where_that_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_GPU_FAKE", "none")
    with load_model(path, device="cuda") as model:
        assert model.device.backend == "cpu"
        assert model.receipt(model.generate("x", max_tokens=1))["strict"] is False
    monkeypatch.delenv("BITNET_GPU_FAKE")
    with pytest.raises(DeviceUnavailableError, match="was asked for, but"):
        load_model(path, device="metal", strict=True)
    monkeypatch.setenv("BITNET_STRICT_MODE", "1")
    with load_model(path, device="metal", strict=False) as model:
        assert model.device.backend == "cpu"
    with load_model(path, device="cpu") as model:
        assert model.receipt(model.generate("x", max_tokens=1))["strict"] is True


def test_a_receipt_tells_of_the_variables_that_the_model_was_loaded_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITNET_GPU_FAKE", "cuda")
    opened = select_device("cuda").open()
    with load_model(path, device=opened) as model:
        monkeypatch.delenv("BITNET_GPU_FAKE")
        receipt = model.receipt(model.generate("x", max_tokens=1))
    assert receipt["fake"] is True
    assert receipt["environment"]["variables"]["BITNET_GPU_FAKE"] == "cuda"


@pytest.mark.parametrize("options", [{"threads": 2}, {"strict": False}], ids=str)
def test_an_open_device_takes_no_options(path: Path, options: Any) -> None:
    with pytest.raises(InvalidInputError, match="already open"):
        load_model(path, device=ReferenceDevice(), **options)


class Switch:
    """A device that says when it is closed."""

    info = ReferenceDevice().info
    closed = 0

    def open(self, *, isolated: bool = False) -> Switch:
        return self

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("wrong", ["merges", "file", "interrupt"])
def test_a_device_that_opened_for_nothing_is_closed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """It opens in a thread while the file is read, and it may take longer than that."""
    device, begun = Switch(), threading.Event()

    def select(request: str | None, **options: object) -> list[Switch]:
        begun.set()
        time.sleep(0.2)
        return [device]

    def interrupt(*_: object, **__: object) -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "select_devices", select)
    data = path.read_bytes()
    if wrong == "merges":
        assert b"a t" in data
        data = data.replace(b"a t", b"a-t")
    elif wrong == "file":
        data = data[:100]
    else:
        monkeypatch.setattr(loading, "open_model", interrupt)
    file = tmp_path / "wrong.gguf"
    file.write_bytes(data)
    interval = sys.getswitchinterval()
    with pytest.raises(KeyboardInterrupt if wrong == "interrupt" else ModelFileError):
        load_model(file)
    assert device.closed == 1
    assert sys.getswitchinterval() == interval


def test_a_device_that_does_not_open(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def select(request: str | None, **options: object) -> None:
        asked.append(request)
        raise DeviceUnavailableError("there is none.")

    monkeypatch.setattr(opening, "select_devices", select)
    with pytest.raises(ModelFileError, match="cannot be opened"):  # said before a driver is looked for
        load_model(tmp_path / "nothing.gguf", device="gpu")
    assert asked == []
    with pytest.raises(DeviceUnavailableError, match="there is none"):
        load_model(path, device="gpu")
    assert asked == ["gpu"]


def test_a_closed_model_says_so(path: Path) -> None:
    model = load_model(path, device=ReferenceDevice())
    model.close()
    model.close()
    with pytest.raises(InvalidInputError, match="closed"):
        model.generate("x")


def test_the_cache_is_as_large_as_asked_and_affordable(model: Model) -> None:
    def blocks(free: int, max_seqs: int = 8) -> int:
        sizes: dict[str, int] = {"context": 256, "max_seqs": max_seqs, "step_tokens": 512}
        return cache_blocks(model.config, **sizes, kv_dtype="f16", free=free)

    block = 2 * 2 * 2 * 32 * 32 * 2  # k and v, layers, heads, elements, positions, bytes
    assert blocks(1 << 40) == 64
    assert blocks(1 << 40, max_seqs=1) == 8
    assert blocks(4 * 20 * block) == 20
    assert blocks(0) == 8


def test_windows_bound_the_memory_of_a_context(model: Model) -> None:
    """Maple's shape: 12 KiB for each position in the 6 layers that attend in full, 18 layers with windows of 512."""
    slides = (True, True, True, False) * 6
    shape: dict[str, Any] = {"layers": 24, "kv_heads": 4, "head_dim": 128, "context_length": 131_072}
    config = replace(model.config, **shape, windows=Windows(512, slides))
    layer = 2 * 4 * 128 * 2
    assert position_bytes(config, "f16") == 6 * layer + 4 * 128 == 12_288 + 512
    assert window_bytes(config, "f16", 131_072) == 18 * layer * 17 * 32  # less than 20 MB
    assert window_bytes(config, "f16", 100) == 18 * layer * 4 * 32

    def blocks(context: int, max_seqs: int, step_tokens: int) -> int:
        sizes = {"context": context, "max_seqs": max_seqs, "step_tokens": step_tokens}
        return cache_blocks(config, **sizes, kv_dtype="f16", free=1 << 50)

    assert blocks(131_072, 1, 512) == 4096 + 3 * 33
    assert blocks(256, 8, 512) == 8 * 4 * 8
    layout = cache_layout(config)
    assert (layout.layers, layout.windows) == (6, (None, 512, 512, 512))
    assert sorted(layout.places) == [(table, layer) for table in range(4) for layer in range(6)]
    assert all((layout.windows[table] is None) is not slides[i] for i, (table, _) in enumerate(layout.places))


def test_a_context_that_nobody_asked_for_is_bounded_by_the_file(model: Model) -> None:
    """A file of 3 MB with a wide cache took 1.3 GB for 4096 positions."""

    def context(size: int, **changes: Any) -> int:
        config = replace(model.config, **changes)
        return default_context(config, size=size, kv_dtype="f16", total=1 << 50, free=1 << 50)

    assert context(1 << 20) == 256
    assert context(1 << 30, context_length=2**31 - 1) == 131_072
    wide: dict[str, int] = {"context_length": 4096, "layers": 40, "kv_heads": 512, "head_dim": 32}
    position = 2 * 40 * 512 * 32 * 2 + 4 * 32
    for size in (1 << 20, 1 << 27):
        assert context(size, **wide) == (8 * size + (256 << 20)) // position < 4096
    assert context(0, **wide | {"layers": 10**6}) == 32
    # Falcon3 7B, Llama 3 8B and 2B4T have their 4096 positions.
    for size, layers, kv_heads, head_dim in ((3_050, 28, 4, 256), (3_580, 32, 8, 128), (1_190, 30, 5, 128)):
        real = {"context_length": 4096, "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        assert context(size * 10**6, **real) == 4096


def test_a_long_context_is_the_default_where_memory_has_room(model: Model) -> None:
    """Qwen3 8B's shape: 147,968 bytes a position with the rotary tables' in f16, 76,544 in i8."""
    config = replace(model.config, context_length=1 << 18, layers=36, kv_heads=8, head_dim=128)

    def context(total: int, free: int, kv_dtype: KVDtype = "f16") -> int:
        return default_context(config, size=2 << 30, kv_dtype=kv_dtype, total=total, free=free)

    each: dict[KVDtype, int] = {"f16": 147_968, "i8": 76_544}
    assert {kv_dtype: position_bytes(config, kv_dtype) for kv_dtype in each} == each
    assert context(80 << 30, 70 << 30) == (10 << 30) // each["f16"] // 1024 * 1024 == 71_680
    assert context(80 << 30, 70 << 30, "i8") == 131_072
    assert context(80 << 30, 4 << 30) == (2 << 30) // each["f16"] // 1024 * 1024 == 14_336
    assert context(16 << 30, 12 << 30) == (2 << 30) // each["f16"] // 1024 * 1024
    assert context(16 << 30, 12 << 30, "i8") == (2 << 30) // each["i8"] // 1024 * 1024 == 27_648
    assert context(4 << 30, 3 << 30) == context(0, 0) == 4096


def test_replicas_have_the_default_context_of_the_smallest(tmp_path: Path) -> None:
    class Small(ReferenceDevice):
        def memory(self) -> MemoryInfo:
            return MemoryInfo(32 << 20, 32 << 20, 0)

    maker = tool("make_random_model")
    shape = maker.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=192, context=16_384, vocab=520)
    maker.make_model(tmp_path / "long.gguf", shape)
    file = open_model(tmp_path / "long.gguf")
    assert context_for(file, [ReferenceDevice()], kv_dtype="f16") == 16_384
    assert context_for(file, [ReferenceDevice(), Small()], kv_dtype="f16") == 10_240
    with load_model(tmp_path / "long.gguf", device=Small()) as model:
        assert model.context == 10_240


def test_a_cache_in_int8(path: Path) -> None:
    """An int8 cache takes half the memory, computes what f16 does except for rounding, and shares its prefixes."""
    text = "The cache holds keys and values of all positions that a sequence has."
    with load_model(path, device="cpu") as model:
        exact, size = np.array(model.score(text)[1:]), model.cache_bytes
    with load_model(path, device="cpu", kv_dtype="i8") as model:
        found = np.array(model.score(text)[1:])
        assert model.cache_bytes == size * 36 // 64  # 32 elements a row
        first, again = (model.generate(text, max_tokens=8, ignore_eos=True) for _ in range(2))
        assert first.tokens == again.tokens
        assert again.timings.cached_tokens >= 32
    assert 0 < np.abs(found - exact).max() < 0.2


def test_a_device_without_int8_caches_refuses_them(path: Path) -> None:
    device = ReferenceDevice(replace(NUMPY_INFO, features=()))
    with pytest.raises(UnsupportedProgramError, match=r"cpu:numpy: it keeps no KV cache in int8\..*--kv-dtype f16"):
        load_model(path, device=device, kv_dtype="i8")


def test_a_context_beyond_all_memory_is_refused_before_it_is_made(path: Path, tmp_path: Path) -> None:
    maker = tool("make_random_model")
    shape = maker.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=192, context=2**31 - 1, vocab=520)
    maker.make_model(tmp_path / "long.gguf", shape)
    with pytest.raises(OutOfMemoryError, match="a context of 2147483647 tokens needs"):
        load_model(tmp_path / "long.gguf", device="cpu", context=2**31 - 1)


INTERRUPTED = """
import json, signal, sys, threading
from bitnet.core.loading import load_model
from bitnet.core.gguf import TensorSource, write_gguf
from bitnet.core.hal.check import StepCheck
from bitnet.core.model import open_model
from bitnet.core.reference import ReferenceDevice
from bitnet.core.text.vocabulary import Vocabulary
signal.signal(signal.SIGINT, signal.default_int_handler)
model = load_model(sys.argv[1], device=ReferenceDevice())
expected = model.generate("again", max_tokens=5).tokens
print("ready", flush=True)
try:
    for chunk in model.stream("x", max_tokens=250, ignore_eos=True):
        print("chunk", flush=True)
    print("ended")
except KeyboardInterrupt:
    print(json.dumps(model.generate("again", max_tokens=5).tokens == expected))
model.stream("y")  # still running at exit
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a process")
def test_an_interrupt_leaves_the_model_usable(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "chunk\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert json.loads(out.splitlines()[-1]) is True, err
    assert process.returncode == 0, err
