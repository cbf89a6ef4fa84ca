"""``python compile_unchecked.py SOURCE.metal`` prints the path of its library, in which no access is looked up."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shim"))

from metal_shim import compiled

print(compiled(Path(sys.argv[1]).read_text(encoding="utf-8"), checks=False))
