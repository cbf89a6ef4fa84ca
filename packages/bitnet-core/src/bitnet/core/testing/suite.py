"""The suite as one class."""

from __future__ import annotations

from bitnet.core.testing.attention import AttentionTests
from bitnet.core.testing.determinism import DeterminismTests
from bitnet.core.testing.heads import HeadTests
from bitnet.core.testing.int8_cache import Int8CacheTests
from bitnet.core.testing.lifecycle import LifecycleTests
from bitnet.core.testing.linear import LinearTests
from bitnet.core.testing.logprobs import LogprobTests
from bitnet.core.testing.look_ahead import LookAheadTests
from bitnet.core.testing.norms import NormTests
from bitnet.core.testing.penalties import PenaltyTests
from bitnet.core.testing.probing import ProbeTests
from bitnet.core.testing.rowwise import RowwiseTests
from bitnet.core.testing.sampling import SampleTests
from bitnet.core.testing.tables import TableTests
from bitnet.core.testing.whole_model import WholeModelTests


class ConformanceSuite(
    ProbeTests,
    LinearTests,
    NormTests,
    RowwiseTests,
    AttentionTests,
    Int8CacheTests,
    HeadTests,
    TableTests,
    SampleTests,
    PenaltyTests,
    LogprobTests,
    WholeModelTests,
    DeterminismTests,
    LookAheadTests,
    LifecycleTests,
):
    """All tests that hold a backend to the contract, on each of its devices.

    A backend runs it from a test file of its own::

        from bitnet.core.testing import ConformanceSuite
        from bitnet.mine.backend import BACKEND

        class TestMine(ConformanceSuite):
            backend = BACKEND

    Name ``devices = ("mine:0",)`` to leave others out, and ``size = "small"`` for an emulated one. A test cannot be
    replaced. One that is to be mended goes into ``expected_failures``, with the reason, and fails once it passes; one
    that a device can never pass goes into ``exclusions``, and is reported with its reason. A test of a backend's own
    that takes hardware not all of its devices have names the probe's features for it: ``@needs("int8-tensor-cores")``.

    Environment:
        BITNET_CONFORMANCE: ``small``, ``quick`` or ``full`` instead of the class's size.
        BITNET_CONFORMANCE_SEED: Repeats the random inputs of a run; a failing test prints it.
        BITNET_CONFORMANCE_UNWRITTEN: 1 for tools that look for reads of unwritten memory: nothing is poisoned.
        BITNET_REQUIRE_DEVICES: Devices (``cpu:avx2,cuda:0``) that fail where they are absent, instead of being skipped.
    """
