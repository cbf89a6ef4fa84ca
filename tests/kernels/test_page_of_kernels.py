"""The page "Add a backend in a day" has every kernel of the OpenCL family, but those that its toy does without."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-backend.md"


def test_the_page_has_every_kernel() -> None:
    titles = re.findall(r'^```python title="kernels/([^"]+)"', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    written = {Path(title).stem for title in titles}
    assert written == {file.stem for file in (ROOT / "kernels" / "opencl").glob("*.cl")} - {
        # ways of OpenCL C to do what the toy has one kernel for, or none
        "attention_decode", "attention_prefill", "row_sums", "ternary_decode", "ternary_gemm",
        # for models of a family that the toy refuses
        "ternary_groups", "head_norms",
        # for features that the toy does not list
        "adjust", "logprobs", "table_embed", "table_matmul",
        "expert_glu", "expert_matmul", "expert_tiles", "route",
        "causal_conv", "delta_gates", "delta_rule", "gated_values", "glu_values", "hadamard", "norm_values",
        "transform_quant", "put_columns",
    } | {"common", "ternary_matmul"}  # fmt: skip
