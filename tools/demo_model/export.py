"""Write the trained model as GGUF: ``python -m demo_model.export DIR FILE``; ``demo_model.train`` filled DIR."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource, i2s_bytes, write_gguf
from bitnet.core.gguf.writer import Tensor
from bitnet.core.text.vocabulary import GPT2, TokenType, Vocabulary
from demo_model import tokens
from demo_model.shape import Shape

ARCHITECTURE = "bitnet-b1.58"
FILE_TYPE = 40
"""``general.file_type`` of I2_S files, as BitNet b1.58 2B4T's official one has it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_model.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trained", type=Path, metavar="DIR")
    parser.add_argument("file", type=Path, metavar="FILE")
    args = parser.parse_args()
    export(args.trained, args.file)
    print(f"{args.file}: {args.file.stat().st_size:,} bytes")


def export(trained: Path, file: Path) -> None:
    """Write the ``weights.npz`` and ``tokenizer.json`` of a folder as one GGUF file."""
    with np.load(trained / "weights.npz") as arrays:
        tensors: dict[str, Tensor] = {}
        for name in arrays.files:
            stem, _, part = name.rpartition(".")
            if part == "codes":
                data = i2s_bytes(arrays[name], float(arrays[f"{stem}.scale"]))
                tensors[f"{stem}.weight"] = TensorSource(arrays[name].shape, GGMLType.I2_S, data)
            elif part != "scale":
                tensors[f"{name}.weight"] = arrays[name]
        layers = sum(name.endswith("attn_q.codes") for name in arrays.files)
        weights = sum(arrays[name].size for name in arrays.files)
    metadata = _metadata(Shape(layers=layers), weights)
    write_gguf(file, metadata | _vocabulary(trained / "tokenizer.json").metadata(), tensors)


def _metadata(shape: Shape, weights: int) -> dict[str, MetadataValue]:
    return {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": "BitNet Demo",
        "general.description": f"A ternary model of {weights / 1e6:.0f} million weights, trained on generated text.",
        "general.license": "mit",
        "general.languages": ["en"],
        "general.size_label": f"{weights / 1e6:.0f}M",
        "general.file_type": FILE_TYPE,
        "general.quantization_version": 2,
        **sizes(shape),
        "tokenizer.chat_template": tokens.CHAT_TEMPLATE,
    }


def sizes(shape: Shape) -> dict[str, MetadataValue]:
    """The keys that say a shape."""
    return {
        f"{ARCHITECTURE}.vocab_size": shape.vocab_size,
        f"{ARCHITECTURE}.context_length": shape.context_length,
        f"{ARCHITECTURE}.embedding_length": shape.hidden_size,
        f"{ARCHITECTURE}.block_count": shape.layers,
        f"{ARCHITECTURE}.feed_forward_length": shape.ffn_size,
        f"{ARCHITECTURE}.rope.dimension_count": shape.head_dim,
        f"{ARCHITECTURE}.rope.freq_base": shape.rope_theta,
        f"{ARCHITECTURE}.attention.head_count": shape.heads,
        f"{ARCHITECTURE}.attention.head_count_kv": shape.kv_heads,
        f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon": shape.rms_eps,
    }


def _vocabulary(path: Path) -> Vocabulary:
    tokenizer = tokens.load(path)
    ids = tokenizer.get_vocab()
    names = sorted(ids, key=ids.__getitem__)
    return Vocabulary(
        model="gpt2",
        tokens=names,
        types=[int(TokenType.CONTROL if name in tokens.SPECIAL else TokenType.NORMAL) for name in names],
        merges=tokens.merges(tokenizer),
        scores=[],
        pre=GPT2,
        bos_id=tokens.BOS,
        eos_id=tokens.EOT,
        add_bos=True,
    )


if __name__ == "__main__":
    main()
