"""The demo model in headless Chromium, on the WebGPU of its software device, SwiftShader."""

from __future__ import annotations

import base64
import inspect
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cpu.backend import BACKEND as CPU
from bitnet.core.hal import Device, OpenOptions
from bitnet.core.testing.whole_model import END_TO_END, TYPICAL
from make_demo_eval import FILE as EVALUATION
from make_random_model import make_model
from random_shapes import PRESETS

pytestmark = pytest.mark.nightly  # starts Pyodide and compiles the kernels: a minute

QUESTIONS = ["What is 17 + 25?", "What is 8 + 5?"]
ASK = """
import json
from bitnet.core import load_model_async

compiled = []
model = await load_model_async(
    device="webgpu", context=512, max_seqs=3, progress=lambda *counts: compiled.append(counts)
)
requests = [model.chat_stream([{"role": "user", "content": text}], max_tokens=12) for text in QUESTIONS]
answers = [await request for request in requests]
sampled = await model.chat_stream(
    [{"role": "user", "content": QUESTIONS[1]}], max_tokens=4, temperature=0.8, seed=5,
    repetition_penalty=1.2, logprobs=1,
)
found = [answer.tokens for answer in [*answers, sampled]]
name, description = model.device.name, model.device.description
kernels = model.kernels
model.close()
json.dumps([name, answers[0].text, found, kernels, compiled])
"""
LOSE = """
import json, js
from bitnet.core import load_model_async

async def load():
    return await load_model_async(device="webgpu", context=512, max_seqs=1)

def ask(model):
    return model.chat_stream([{"role": "user", "content": "What is 17 + 25?"}], max_tokens=12)

model, errors = await load(), []
request = ask(model)
async for chunk in request:
    break
await js.crashGpu()
for request in (request, ask(model)):
    try:
        await request
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
model.close()
model = await load()
json.dumps([errors, model.device.name, (await ask(model)).text])
"""
PROBLEMS = """
import json
from bitnet.core import load_model_async

model = await load_model_async(device="webgpu", context=512, max_seqs=8)
requests = [model.chat_stream([{"role": "user", "content": text}], max_tokens=60) for text in QUESTIONS]
answers = [await request for request in requests]
found = [model.device.name, [answer.tokens for answer in answers], [answer.text for answer in answers]]
model.close()
json.dumps(found)
"""
LOGITS = """
import base64, json
from pathlib import Path
from pyodide.http import pyfetch
from bitnet.core.hal import OpenOptions
from bitnet.webgpu.backend import BACKEND

Path("model.gguf").write_bytes(await (await pyfetch("model.gguf")).bytes())
await BACKEND.request()
(info,) = BACKEND.probe().devices
device = BACKEND.open(info, OpenOptions())
found = logits(device, "model.gguf", TOKENS, COUNTS)
device.close()
json.dumps([info.name, info.description, base64.b64encode(found.tobytes()).decode()])
"""
REFUSED = """
import json, logging
from bitnet.core import load_model_async

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("bitnet").addHandler(handler)
model = await load_model_async(device="webgpu", context=64)
json.dumps([model.device.name, " ".join(said)])
"""


def test_the_demo_model_gives_the_cpus_tokens(chromium: Callable[..., Any]) -> None:
    """Several sequences at once; also sampled with a penalty and log-probabilities."""
    name, text, found, kernels, compiled = chromium(f"QUESTIONS = {QUESTIONS!r}\n{ASK}")
    assert name == "webgpu:0"
    assert text == "17 + 25 = 42."
    assert all(kernel.endswith("_webgpu") for kernel in kernels)
    assert [done for done, _ in compiled] == list(range(1, compiled[-1][1] + 1))
    with load_model(device="cpu", context=512) as model:
        expected = [model.chat([{"role": "user", "content": q}], max_tokens=12).tokens for q in QUESTIONS]
        more: dict[str, Any] = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1}
        expected.append(model.chat([{"role": "user", "content": QUESTIONS[1]}], max_tokens=4, **more).tokens)
    assert [tuple(tokens) for tokens in found] == expected


def test_100_problems_of_the_evaluation_give_the_cpus_tokens(chromium: Callable[..., Any]) -> None:
    """Of all categories, eight at a time."""
    lines = map(json.loads, EVALUATION.read_text(encoding="utf-8").splitlines())
    questions = [line["question"] for line in lines if "question" in line][::15][:100]
    assert len(questions) == 100
    name, tokens, texts = chromium(f"QUESTIONS = {questions!r}\n{PROBLEMS}")
    assert name == "webgpu:0"
    with load_model(device="cpu", context=512) as model:
        prompts = [[{"role": "user", "content": question}] for question in questions]
        expected = [model.chat(messages, max_tokens=60) for messages in prompts]
    pairs = zip(questions, texts, tokens, expected, strict=True)
    wrong = [(q, text, right.text) for q, text, found, right in pairs if tuple(found) != right.tokens]
    assert not wrong, wrong


def logits(device: Device, path: str, tokens: list[int], counts: list[int]) -> np.ndarray:
    """The logits of each token of a text, which is fed in parts of so many tokens: f32[tokens, vocabulary]."""
    import numpy as np

    from bitnet.core.hal import Limits, SequenceStep, Step, StepLayout, run
    from bitnet.core.model.file import open_model
    from bitnet.core.model.program import BLOCK_SIZE, build_program

    file, width = open_model(path), -(-len(tokens) // BLOCK_SIZE)
    limits = Limits(max(counts), 1, max(counts), width)
    program = build_program(file.config, file.weights, limits=limits, num_blocks=width, kv_dtype="f32")
    executable, found, done = device.compile(program), [], 0
    for count in counts:
        part = np.array(tokens[done : done + count], np.int32)
        done += count
        fed = SequenceStep(part, done, list(range(width)), list(range(count)))
        run(executable, Step(StepLayout(limits), [fed], block_size=BLOCK_SIZE))
        found.append(np.array(executable.read("logits", count)))
    executable.close()
    return np.concatenate(found)


def test_a_random_model_with_the_widths_of_2b4t_gives_the_cpus_logits(
    chromium: Callable[..., Any], tmp_path: Path
) -> None:
    """Two of its 30 layers, and 4,096 of its 128,256 tokens: a prompt in two parts, then token by token."""
    seed = secrets.randbelow(2**31)
    shape = replace(PRESETS["2b4t"], layers=2, vocab=4096)
    make_model(tmp_path / "model.gguf", shape, seed=seed)
    counts = [19, 6, 1, 1, 1, 1]
    tokens = np.random.default_rng(seed).integers(0, shape.vocab, sum(counts)).tolist()
    script = f"TOKENS, COUNTS = {tokens!r}, {counts!r}\n{inspect.getsource(logits)}\n{LOGITS}"
    script = f"from __future__ import annotations\n{script}"
    name, described, data = chromium(script, files={"model.gguf": tmp_path / "model.gguf"})
    assert name == "webgpu:0"
    found = np.frombuffer(base64.b64decode(data), np.float32).reshape(len(tokens), shape.vocab)
    device = CPU.open(CPU.probe().devices[0], OpenOptions())
    expected = logits(device, str(tmp_path / "model.gguf"), tokens, counts)
    device.close()
    errors = abs(found - expected).max(axis=1) / abs(expected).max(axis=1)
    print(f"{described}, seed {seed}: differences of rows {np.sort(errors)[::-1][:5]}, median {np.median(errors)}")
    assert errors.max() <= END_TO_END, errors
    assert np.median(errors) <= TYPICAL, errors


def test_a_lost_device_is_an_error_and_another_load_recovers(chromium: Callable[..., Any]) -> None:
    """The browser's process for the GPU ends in the middle of an answer."""
    errors, again, text = chromium(LOSE)
    assert all("DeviceLostError" in error and "Load the model again" in error for error in errors)
    assert len(errors) == 2
    assert again == "webgpu:0"
    assert text == "17 + 25 = 42."


def test_a_browser_without_webgpu_says_so(chromium: Callable[..., Any]) -> None:
    name, text = chromium(REFUSED, before="delete Navigator.prototype.gpu;")
    assert name == "cpu:simd128"
    assert "no WebGPU" in text
    assert "Use a browser with WebGPU" in text


def test_a_browser_that_gives_no_adapter_says_so(chromium: Callable[..., Any]) -> None:
    name, text = chromium(REFUSED, before="GPU.prototype.requestAdapter = async () => null;")
    assert name == "cpu:simd128"
    assert "finds no GPU" in text


def test_an_adapter_that_is_not_had_by_preference_computes(chromium: Callable[..., Any]) -> None:
    only = "const ask = GPU.prototype.requestAdapter; GPU.prototype.requestAdapter = async function (options) "
    name, _ = chromium(REFUSED, before=only + "{ return options?.powerPreference ? null : ask.call(this, options); };")
    assert name == "webgpu:0"
