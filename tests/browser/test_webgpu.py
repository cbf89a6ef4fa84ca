"""The demo model in headless Chromium, on the WebGPU of its software device, SwiftShader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core import load_model

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
