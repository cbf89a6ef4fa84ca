"""The conformance suite, which tests devices against ``kernels/README.md``; see :class:`ConformanceSuite`.

It needs pytest: ``pip install "bitnet-core[testing]"``.
"""

import pytest

pytest.register_assert_rewrite(
    *(
        f"bitnet.core.testing.{name}"
        for name in (
            "rig",
            "linear",
            "norms",
            "embedders",
            "attention",
            "recurrent",
            "transforms",
            "heads",
            "tables",
            "sampling",
            "penalties",
            "logprobs",
            "whole_model",
            "answers",
        )
    ),
    *(
        f"bitnet.core.testing.{name}"
        for name in ("lifecycle", "probing", "model", "oracle", "oracle_recurrent", "draws", "poison")
    ),
)

from bitnet.core.testing.cases import needs  # noqa: E402  (after the rewriting of its modules' asserts)
from bitnet.core.testing.suite import ConformanceSuite  # noqa: E402

__all__ = ["ConformanceSuite", "needs"]
