"""Speed of a static site's engine and of wllama (llama.cpp for browsers) in one page of Chromium, in turns.

    uv run python tools/compare_wllama.py --pyodide FOLDER [-m MODEL] [--types f16 q8_0] [--rounds 7]

Both compute on the CPU by one thread. wllama comes from npm, pinned by its hash, into a temporary folder. It gets the
model in each of the types: F16, Q8_0 and Q4_0 with the same numbers, or one that ``bitnet convert`` writes, under
llama.cpp's name of BitNet's graph. That graph has another activation function in the feed-forward layers than BitNet
2B4T's, and quantises activations otherwise or not at all: the text is another one, of as many products. FOLDER has
Pyodide's files, as for `bitnet web build`. Each round asks every engine for a prompt and for a decode, in turns. Rates
are by the engines' own clocks, which leave out loading and the page. Ratios are this project's rate by wllama's in the
same round.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from playwright.sync_api import sync_playwright

from bitnet.core.errors import BitNetError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, unpack_ternary, write_gguf
from bitnet.core.hal import TernaryWeight
from bitnet.core.model.convert import TYPES, convert_model
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model
from bitnet.server.web.build import build
from folder_server import serving
from running import positive, run_tool

WLLAMA = "@wllama/wllama@3.13.0"
SHA256 = "a9eaac205ff9a1d6fdbea395a48652bd5febc56511a7b66b736d862bf726d2d5"
THINGS = ", ".join(["a dog", "a cat", "a tree", "the sea", "a house"] * 12)
SECONDS = 600
"""Seconds in which a page prepares or answers."""
BLOCK = 32
"""Weights that share a scale in llama.cpp's simplest types."""
Codes: TypeAlias = npt.NDArray[np.int8]
"""Ternary weights ``[N, K]``: -1, 0, 1."""
Scales: TypeAlias = npt.NDArray[np.float16]
"""Of each block, ``[N * K / BLOCK, 1]``."""
Rates: TypeAlias = "list[tuple[float, float]]"
"""Tokens a second of a prompt and of a decode, in each round."""
PAGE = """<!doctype html>
<script type="module">
import { load } from "./bitnet.js";
import { Wllama } from "./wllama/index.js";

const engines = {};
window.prepare = async (types) => {
  const model = await load({ device: "cpu", context: 512 });
  engines[model.device] = async (prompt, count) => {
    const body = JSON.stringify({ model: model.name, prompt, n_predict: count, temperature: 0.8, seed: 7,
                                  ignore_eos: true, cache_prompt: false });
    const answer = await model.fetch("/completion", { method: "POST", body,
                                                      headers: { "Content-Type": "application/json" } });
    if (!answer.ok) throw new Error(await answer.text());
    return (await answer.json()).timings;
  };
  for (const type of types) {
    const wllama = new Wllama({ default: new URL("./wllama/wasm/wllama.wasm", location.href).href },
                              { logger: { debug() {}, log() {}, warn() {}, error() {} } });
    const file = await (await fetch(`${type}.gguf`)).blob();
    await wllama.loadModel([file], { n_ctx: 512, n_threads: 1, n_gpu_layers: 0, n_parallel: 1 });
    if (wllama.isMultithread()) throw new Error("wllama uses several threads");
    engines[`wllama ${type}`] = async (prompt, count) => (await wllama.createCompletion({
      prompt, max_tokens: count, temperature: 0.8, seed: 7, cache_prompt: false, ignore_eos: true,
    })).timings;
  }
  return Object.keys(engines);
};
window.ask = (name, prompt, count) => engines[name](prompt, count);
</script>
"""


def fetch_wllama(folder: Path) -> None:
    """Download wllama, check it, and put its module into a folder.

    Raises:
        BitNetError: npm is missing or fails, or the file is another one.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise BitNetError("npm is not on the PATH.", hint="Install Node.")
    packed = subprocess.run([npm, "pack", WLLAMA], cwd=folder, capture_output=True, text=True, check=False)
    if packed.returncode:
        raise BitNetError(f"npm cannot download {WLLAMA}: {packed.stderr.strip()}")
    (archive,) = folder.glob("wllama-*.tgz")
    if (digest := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise BitNetError(f"{archive.name} has the SHA-256 {digest}, not {SHA256}.")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (folder / "package" / "esm").rename(folder / "wllama")
    archive.unlink()


def as_llama_cpp(source: Path, target: Path, kind: str) -> None:
    """Write a model for llama.cpp, with its ternary matrices in a type.

    Args:
        kind: A key of :data:`FORMS`, or a type of ``bitnet convert``.

    Raises:
        BitNetError: The model cannot be converted to the type.
    """
    if kind not in FORMS:
        convert_model(source, target, dtype=kind)
        source = target
    file, weights = GGUFFile(source), open_model(source).weights
    old = str(file.metadata["general.architecture"])
    keys = {key.replace(f"{old}.", "bitnet.", 1): value for key, value in file.typed_metadata().items()}
    keys["general.architecture"] = "bitnet"
    tensors = {}
    for name, tensor in file.tensors.items():
        weight = weights.get(name.removesuffix(".weight"))
        if kind in FORMS and isinstance(weight, TernaryWeight):
            codes, scale = weight.load()
            values = unpack_ternary(codes, weight.shape[1])
            scales = np.repeat(scale, values.size // scale.size // BLOCK).reshape(-1, 1).astype(np.float16)
            tensors[name] = TensorSource(tensor.shape, GGMLType[kind.upper()], FORMS[kind](values, scales))
        else:
            tensors[name] = TensorSource(tensor.shape, tensor.type, file.data(tensor).copy())
    write_gguf(target, keys, tensors)


def f16(values: Codes, scales: Scales) -> npt.NDArray[Any]:
    """Floats."""
    return (values.reshape(-1, BLOCK) * scales).reshape(values.shape)


def q8_0(values: Codes, scales: Scales) -> npt.NDArray[Any]:
    """Blocks of a scale and bytes: the same numbers."""
    blocks = values.reshape(-1, BLOCK).view(np.uint8)
    return np.concatenate([scales.view(np.uint8), blocks], axis=1).ravel()


def q4_0(values: Codes, scales: Scales) -> npt.NDArray[Any]:
    """Blocks of a scale and half bytes, of which 8 is zero: the same numbers."""
    blocks = (values.reshape(-1, BLOCK) + 8).astype(np.uint8)
    halves = blocks[:, : BLOCK // 2] | blocks[:, BLOCK // 2 :] << 4
    return np.concatenate([scales.view(np.uint8), halves], axis=1).ravel()


FORMS = {form.__name__: form for form in (f16, q8_0, q4_0)}


def measure(folder: Path, types: Sequence[str], rounds: int, tokens: int, chromium: str) -> dict[str, Rates]:
    """Rates of each engine, a pair for each round; this project's engine comes first."""
    with serving(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(SECONDS * 1000)
        page.goto(f"{address}compare.html")
        page.wait_for_function("window.prepare !== undefined")
        names = page.evaluate("types => window.prepare(types)", list(types))
        ask = "([name, prompt, count]) => window.ask(name, prompt, count)"
        rates: dict[str, Rates] = {name: [] for name in names}
        for turn in range(rounds + 1):  # the first one warms up
            for name in names if turn % 2 else names[::-1]:
                prompt = page.evaluate(ask, [name, f"{turn} Tell me a story about {THINGS}.", 1])
                decode = page.evaluate(ask, [name, f"Tell me story {turn} about a dog.", tokens])
                if decode["predicted_n"] != tokens:
                    raise BitNetError(f"{name} made {decode['predicted_n']} tokens, not {tokens}.")
                found = prompt["prompt_per_second"], decode["predicted_per_second"]
                print(
                    f"{turn} {name}: prompt {found[0]:.1f}, decode {found[1]:.1f} tokens/s", file=sys.stderr, flush=True
                )
                if turn:
                    rates[name].append(found)
        browser.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=default_model_path(), help="GGUF file [the demo model]")
    parser.add_argument("--pyodide", required=True, help="folder or address of Pyodide's files")
    parser.add_argument("--types", nargs="+", choices=[*FORMS, *TYPES], default=["f16"], help="wllama's types")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--tokens", type=positive, default=64, help="of a decode")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise BitNetError("Chromium is not installed.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "site"
        build(folder, [arguments.model], arguments.pyodide)
        fetch_wllama(folder)
        for kind in arguments.types:
            as_llama_cpp(arguments.model, folder / f"{kind}.gguf", kind)
        (folder / "compare.html").write_text(PAGE, encoding="utf-8")
        rates = measure(folder, arguments.types, arguments.rounds, arguments.tokens, chromium)
    (ours, base), *_ = rates.items()
    print("| engine | prompt, tokens/s | decode, tokens/s | ratio, prompt | ratio, decode |")
    print("| --- | --- | --- | --- | --- |")
    for name, own in rates.items():
        cells = [f"{statistics.median(column):.1f}" for column in zip(*own, strict=True)]
        for i in (0, 1):
            ratios = sorted(one[i] / other[i] for one, other in zip(base, own, strict=True))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if name != ours else "")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run_tool(main)
