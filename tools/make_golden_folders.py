"""Make tests/oracle/golden/folders.npz: transformers' logits of random folders of Qwen3.5's kind, in fp32 on the CPU.

    PYTHONPATH=tools python tools/make_golden_folders.py  # where torch and transformers are

The inputs of transformers' products are rounded to int8 as bitnet rounds them, after the transform where one is folded
into the weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bitnet.core.model.safetensors import open_checkpoint
from random_qwen35 import signs, write_folder
from random_shapes import PRESETS, HybridShape

ROOT = Path(__file__).resolve().parents[1]
SMALL = PRESETS["bonsai-27b-small"]
assert isinstance(SMALL, HybridShape)
CASES = {
    "hf": ("hf", replace(SMALL, block=None)),
    "hf, odd": ("hf", replace(SMALL, block=None, layers=3, interval=2, k_heads=1, v_heads=4, taps=3, kv_heads=1)),
    "mlx": ("mlx", replace(SMALL, block=None, k_heads=3, v_heads=3, rotary=64)),
    "mlx, transforms": ("mlx", SMALL),
    "mlx, transforms, odd": ("mlx", replace(SMALL, block=128, k_heads=2, v_heads=4, ffn=384, layers=2, interval=2)),
}
TYPES = {"F32": np.float32, "F16": np.float16, "U32": np.uint32}
TOKENS = 80
PATH = ROOT / "tests" / "oracle" / "golden" / "folders.npz"
ROWS = (0, 1, 5, 40, 79)
"""Places whose logits are kept."""


def digest(folder: Path) -> str:
    """SHA-256 of the folder's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def drawn_tokens(case: str) -> np.ndarray:
    """The tokens of a case."""
    return np.random.default_rng([*case.encode()]).integers(0, 256, TOKENS)


def weights(folder: Path) -> dict[str, Any]:
    """The folder's tensors as floats, by transformers' names."""
    import torch

    found = open_checkpoint(folder).items()
    arrays = {n.removeprefix("language_model."): t.bytes().view(TYPES[t.dtype]).reshape(t.shape) for n, t in found}
    out = {}
    for name, stored in arrays.items():
        array: np.ndarray = stored
        base, _, end = name.rpartition(".")
        if end in ("scales", "biases", "signs"):
            continue
        if array.dtype == np.uint32:
            codes = (array[..., None] >> np.arange(0, 32, 2, dtype=np.uint32) & 3).reshape(len(array), -1)
            scales, biases = (arrays[f"{base}.{part}"].astype(np.float32) for part in ("scales", "biases"))
            array = codes * scales.repeat(128, axis=1) + biases.repeat(128, axis=1)
        if base.endswith("conv1d") and array.shape[2] == 1:
            array = array.swapaxes(1, 2)
        mlx = f"{base}.scales" in arrays or "model.embed_tokens.scales" in arrays
        if mlx and base.endswith(("layernorm", "model.norm", "q_norm", "k_norm")):
            array = array - 1
        out[name] = torch.tensor(np.asarray(array, np.float32))
    return out


def transformed(x: Any, block: int, sign: Any) -> Any:
    """``H (s ⊙ x)``, by the definition of the Sylvester-Walsh-Hadamard matrix."""
    import torch

    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return ((x * sign).reshape(*x.shape[:-1], -1, block) @ (matrix / block**0.5)).reshape(x.shape)


def rounded(x: Any) -> Any:
    """Rounded to int8 with a scale a token."""
    import torch

    unit = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x / unit) * unit


def theirs(folder: Path, shape: HybridShape, tokens: np.ndarray) -> np.ndarray:
    """transformers' logits after each token."""
    import torch
    import transformers

    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config))
    model.load_state_dict(weights(folder), strict=True)
    drawn = {width: torch.tensor(sign.astype(np.float32)) for width, sign in signs(shape, 0).items()}

    def enter(module: Any, arguments: tuple[Any, ...]) -> tuple[Any]:
        (x,) = arguments
        x = x if shape.block is None else transformed(x, shape.block, drawn[x.shape[-1]])
        return (x if module is model.lm_head else rounded(x),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("in_proj_a", "in_proj_b")):
            module.register_forward_pre_hook(enter)
    if shape.block is not None:
        sign = drawn[shape.hidden]
        one = torch.ones(shape.hidden)
        table = model.model.embed_tokens
        table.register_forward_hook(lambda module, arguments, out: transformed(out, shape.block, one) * sign)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    return logits


def main() -> None:
    """Write the file."""
    kept: dict[str, Any] = {}
    for case, (kind, shape) in CASES.items():
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            write_folder(folder, shape, 0, kind)  # type: ignore[arg-type]
            kept[f"{case}.weights"] = digest(folder)
            kept[f"{case}.logits"] = theirs(folder, shape, drawn_tokens(case))[list(ROWS)]
    np.savez_compressed(PATH, **kept)


if __name__ == "__main__":
    main()
