"""What llama.cpp computes of the files that `bitnet convert` writes: one table, each architecture by each encoding.

    uv run --with llama-cpp-python==0.3.36 python tools/compare_llama_cpp.py

A random model of each architecture, its matrices with one scale or one a group, is converted to each encoding. Then
llama.cpp and bitnet's reference device compute the logits after each of 32 tokens. A cell has the median over the
tokens of the greatest difference, as a share of the greatest logit. Both round activations, so 0.01 to 0.03 means the
same model; with random weights, another one differs by about 1.

llama-cpp-python comes as source: the command compiles it, which needs a C++ compiler and takes some minutes. To use a
libllama of the same version that was built before, set LLAMA_CPP_LIB_PATH to its folder and put the package's source
on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bitnet.core.errors import BitNetError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, write_gguf
from bitnet.core.hal import Limits, SequenceStep, Step, StepLayout, run
from bitnet.core.model.convert import TYPES, convert_model
from bitnet.core.model.file import open_model
from bitnet.core.model.program import BLOCK_SIZE, build_program
from bitnet.core.reference import ReferenceDevice
from bitnet.core.text.words import byte_characters
from golden_files import ARCHITECTURES, write_golden
from golden_models import Array, GoldenModel
from make_random_model import make_model
from random_qwen35 import write_folder
from random_shapes import PRESETS, HybridShape

TOKENS = 32
VOCAB = 320
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "layers": 2, "vocab": VOCAB}
FAMILIES = ("bitnet", "llama", "qwen2", "qwen3", "olmo", "minicpm", "hunyuan")


class SignedModel(GoldenModel):
    """A model whose weights have no zeros, as Q1_0 needs it."""

    def weights(self) -> dict[str, Array]:
        made = super().weights()
        return {name: np.where(a == 0, 1, a).astype(a.dtype) if a.dtype == np.int8 else a for name, a in made.items()}


def models() -> Iterator[tuple[str, str, GoldenModel]]:
    """Architecture in the file, how scales are spread, and the model."""
    make = partial(GoldenModel, scales=(12.0, 1.4, 64.0), **SHAPE)
    for family in FAMILIES:
        for activation in ("silu", "relu2") if family == "bitnet" else ("silu",):
            model = make(name=f"{family}-peer", family=family, activation=activation)  # type: ignore[arg-type]
            architecture = "bitnet" if family == "bitnet" else ARCHITECTURES.get(family, family)
            yield architecture, "one", model
            yield architecture, "groups", replace(model, group=256)
    yield "bitnet-b1.58", "one", make(name="bitnet-peer", family="bitnet", activation="relu2")
    for family in ("qwen3", "llama"):
        signed = SignedModel(name=f"{family}-signed", family=family, activation="silu", group=128, **SHAPE)  # type: ignore[arg-type]
        yield family, "groups, no zeros", signed


def write(model: GoldenModel, architecture: str, path: Path) -> None:
    """Write the model as its architecture, with a tokenizer of bytes, which both programs need."""
    plain = path.with_name("plain.gguf")
    write_golden(model, plain)
    file = GGUFFile(plain)
    old = str(file.metadata["general.architecture"])
    keys = {key.replace(f"{old}.", f"{architecture}.", 1): value for key, value in file.typed_metadata().items()}
    characters = list(byte_characters().values())
    names = [f"<{i}>" for i in range(len(characters), model.vocab)]
    names[-3] = "ab"  # what the only merge makes
    keys |= {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": characters + names,
        "tokenizer.ggml.token_type": np.array([1] * len(characters) + [3] * (model.vocab - len(characters)), np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": model.vocab - 1,
        "tokenizer.ggml.eos_token_id": model.vocab - 2,
    }
    tensors = {name: TensorSource(t.shape, t.type, file.data(t)) for name, t in file.tensors.items()}
    write_gguf(path, keys, tensors)


def ours(path: Path, tokens: Array) -> Array:
    """Logits after each token, ``[tokens, vocabulary]``."""
    file, width = open_model(path), -(-len(tokens) // BLOCK_SIZE)
    limits = Limits(len(tokens), 1, len(tokens), width)
    program = build_program(file.config, file.weights, limits=limits, num_blocks=width, kv_dtype="f32")
    executable = ReferenceDevice().compile(program)
    step = SequenceStep(tokens, len(tokens), list(range(width)), list(range(len(tokens))))
    run(executable, Step(StepLayout(limits), [step]))
    return np.array(executable.read("logits", len(tokens)))


def theirs(path: Path, tokens: Array) -> Array | None:
    """The same by llama.cpp; None if it refuses the file."""
    import llama_cpp as llama  # type: ignore[import-not-found]

    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        return None
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = 512, 512, 512
    context = llama.llama_init_from_model(model, parameters)
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens.tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if llama.llama_decode(context, batch):
        raise BitNetError(f"llama.cpp cannot compute {path}.")
    found = llama.llama_get_logits(context)
    logits: Array = np.ctypeslib.as_array(found, (len(tokens), VOCAB)).copy()
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return logits


def cell(source: Path, encoding: str, tokens: Array) -> str:
    """The difference, or why there is none."""
    made = source.with_name(f"{encoding}.gguf")
    try:
        convert_model(source, made, dtype=encoding)
    except BitNetError:
        return "—"
    found = theirs(made, tokens)
    if found is None:
        return "refused"
    expected = ours(made, tokens)
    errors = abs(found - expected).max(axis=1) / abs(expected).max(axis=1)
    return f"{np.median(errors):.3f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import llama_cpp as llama

    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.int32)
    print(f"| architecture | activation | scales | {' | '.join(TYPES)} |")
    print("| --- | --- | --- |" + " --- |" * len(TYPES))
    for architecture, scales, model in models():
        with TemporaryDirectory() as folder:
            source = Path(folder) / "source.gguf"
            write(model, architecture, source)
            cells = [cell(source, encoding, tokens) for encoding in TYPES]
        print(f"| `{architecture}` | {model.activation} | {scales} | {' | '.join(cells)} |", flush=True)
    with TemporaryDirectory() as folder:
        source = hybrid(Path(folder) / "source")
        print(f"| `qwen35` | silu | groups | {' | '.join(cell(source, encoding, tokens) for encoding in TYPES)} |")
        source = signed_hybrid(Path(folder) / "signed.gguf")
        print(f"| `qwen35` | silu | groups, no zeros | {' | '.join(cell(source, t, tokens) for t in TYPES)} |")


def hybrid(path: Path) -> Path:
    """A folder of floats of Qwen3.5's graph."""
    shape = PRESETS["bonsai-27b-small"]
    assert isinstance(shape, HybridShape)
    write_folder(path, replace(shape, block=None, vocab=VOCAB), 0, "hf")
    return path


def signed_hybrid(path: Path) -> Path:
    """A file of Qwen3.5's graph in Q1_0, its embedding and head among it."""
    shape = PRESETS["bonsai-27b-small"]
    assert isinstance(shape, HybridShape)
    make_model(path, replace(shape, block=None, vocab=VOCAB, encoding=GGMLType.Q1_0))
    return path


if __name__ == "__main__":
    main()
