"""A model file of more than 2 GB, which no JavaScript array and no memory of a browser's Python holds, is read in
slices: in Pyodide on Node, from a file with a hole of that size between its header and its tensors."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitnet.core
from bitnet.core import load_model
from bitnet.core.gguf import GGUFFile
from bitnet.core.model.default import default_model_path

HOLE = 5 << 30
"""Bytes: more than a memory of 32-bit addresses has, too."""
ASK = """
import json
from pathlib import Path
from bitnet.core import load_model_async

(path,) = Path(folders[2]).glob("*.gguf")
model = await load_model_async(path, device="cpu", context=256, max_seqs=1)
completion = await model.chat_stream([{"role": "user", "content": "Count to three."}], max_tokens=12)
import js
print(json.dumps([path.stat().st_size, completion.tokens, js.process.memoryUsage().rss]))
"""


def with_hole(source: Path, target: Path) -> None:
    """Write a model file whose tensors come :data:`HOLE` bytes later."""
    data, file = bytearray(source.read_bytes()), GGUFFile(source)
    begin = min(tensor.offset for tensor in file.tensors.values())
    for name, tensor in file.tensors.items():
        entry = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(tensor.shape))
        at = data.index(entry) + len(entry) + 8 * len(tensor.shape) + 4
        (offset,) = struct.unpack_from("<Q", data, at)
        assert offset == tensor.offset - begin
        struct.pack_into("<Q", data, at, offset + HOLE)
    with target.open("wb") as out:
        out.write(data[:begin])
        out.seek(begin + HOLE)
        out.write(data[begin:])


def test_a_model_file_of_five_gigabytes_answers(
    node: Callable[..., Any], with_numpy: Path, pure: Path, tmp_path: Path
) -> None:
    model = tmp_path / "models" / "large.gguf"
    model.parent.mkdir()
    with_hole(default_model_path(), model)
    shutil.copy(Path(__file__).parent / "run.mjs", tmp_path)
    (tmp_path / "script.py").write_text(ASK, encoding="utf-8")
    core = Path(bitnet.core.__file__ or "").parents[2]
    ended = node("node", ["run.mjs", *map(str, (with_numpy, "script.py", core, pure, model.parent))], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    size, tokens, memory = json.loads(ended.stdout.splitlines()[-1])
    assert size == default_model_path().stat().st_size + HOLE
    assert memory < 1 << 30  # bytes: Node, Python, numpy and the weights
    with load_model(device="cpu") as plain:
        expected = plain.chat([{"role": "user", "content": "Count to three."}], max_tokens=12)
    assert tuple(tokens) == expected.tokens
