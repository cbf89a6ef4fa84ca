"""The suite as one class."""

from __future__ import annotations

from bitnet.core.testing.attention import AttentionTests
from bitnet.core.testing.block_tables import BlockTableTests
from bitnet.core.testing.determinism import DeterminismTests
from bitnet.core.testing.embedders import EmbedderTests
from bitnet.core.testing.experts import ExpertTests
from bitnet.core.testing.heads import HeadTests
from bitnet.core.testing.hybrid import HybridTests
from bitnet.core.testing.hybrid_steps import HybridStepTests
from bitnet.core.testing.int8_cache import Int8CacheTests
from bitnet.core.testing.lifecycle import LifecycleTests
from bitnet.core.testing.linear import LinearTests
from bitnet.core.testing.logprobs import LogprobTests
from bitnet.core.testing.mixture_steps import MixtureStepTests
from bitnet.core.testing.norms import NormTests
from bitnet.core.testing.penalties import PenaltyTests
from bitnet.core.testing.probing import ProbeTests
from bitnet.core.testing.recurrent import RecurrentTests
from bitnet.core.testing.rowwise import RowwiseTests
from bitnet.core.testing.sampling import SampleTests
from bitnet.core.testing.starting import LookAheadTests, StartTests
from bitnet.core.testing.tables import TableTests
from bitnet.core.testing.transforms import TransformTests
from bitnet.core.testing.whole_model import WholeModelTests
from bitnet.core.testing.windows import WindowTests


class ConformanceSuite(
    ProbeTests,
    LinearTests,
    NormTests,
    RowwiseTests,
    EmbedderTests,
    RecurrentTests,
    TransformTests,
    ExpertTests,
    AttentionTests,
    WindowTests,
    Int8CacheTests,
    HeadTests,
    TableTests,
    BlockTableTests,
    SampleTests,
    PenaltyTests,
    LogprobTests,
    WholeModelTests,
    HybridTests,
    DeterminismTests,
    HybridStepTests,
    MixtureStepTests,
    StartTests,
    LookAheadTests,
    LifecycleTests,
):
    """All tests of a backend against the contract, on each of its devices.

    A backend runs it from a test file of its own::

        from bitnet.core.testing import ConformanceSuite
        from bitnet.mine.backend import BACKEND

        class TestMine(ConformanceSuite):
            backend = BACKEND

    Set ``devices = ("mine:0",)`` to test only these, and ``size = "small"`` for an emulated device. Tests cannot be
    overridden. List a test that fails until a fix in ``expected_failures``, with the reason; it fails once it passes.
    List a test that a device can never pass in ``exclusions``; it is reported with its reason. If a backend's own test
    needs hardware that not all of its devices have, name the probe's features: ``@needs("int8-tensor-cores")``. Define
    ``hosted`` for devices that compute in host memory, and reads past the end of a buffer are found, too.

    Environment: BITNET_CONFORMANCE: ``small``, ``quick`` or ``full``, in place of the class's size.
        BITNET_CONFORMANCE_SEED: Seed that reproduces the random inputs of a run; a failing test prints it.
        BITNET_CONFORMANCE_UNWRITTEN: 1 disables poisoning, for tools that detect reads of unwritten memory.
        BITNET_REQUIRE_DEVICES: Devices (``cpu:avx2,cuda:0``) whose tests fail, instead of being skipped, if they are
        missing.
    """
