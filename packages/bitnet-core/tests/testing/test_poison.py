"""The suite's poison is everywhere that no kernel may read, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import Limits, SamplingParams, SequenceStep, Step, StepLayout
from bitnet.core.testing import poison


def test_a_step_is_poisoned_past_its_tokens_sequences_and_rows() -> None:
    layout = StepLayout(Limits(max_tokens=9, max_seqs=4, max_rows=5, max_blocks=3))
    parts = [SequenceStep([5, 6], 7, [2], [1], SamplingParams(0.5, seed=9)), SequenceStep([8], 3, [1], [0])]
    plain, step = Step(layout, parts), poison.poison_step(Step(layout, parts))
    changed = np.flatnonzero(plain.data != step.data)
    at = layout.offsets
    spare = {"tokens": 6, "token_seq": 6, "seq_begin": 2, "seq_len": 2, "rows": 3, "block_table": 6}
    spare |= dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed_lo", "seed_hi"), 3)
    spare |= dict.fromkeys(("slot", "repetition", "presence", "frequency"), 5)  # the step adjusts no logits
    names = list(at)
    found = dict.fromkeys(names, 0)
    for word in changed:
        found[max((n for n in names if at[n] <= word), key=at.__getitem__)] += 1
    assert {name: count for name, count in found.items() if count} == spare
    assert set(step.data[changed].tolist()) == {int(poison.WORD)}


def test_the_word_is_no_number_and_no_index() -> None:
    bits = np.array([poison.WORD])
    assert np.isnan(bits.view(np.float32)).all()
    assert np.isnan(bits.view(np.float16)).all()
    assert poison.WORD > 2**30


class Memory:
    """A driver that hands out arrays."""

    def alloc(self, nbytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return np.zeros(nbytes, np.uint8)

    def upload(
        self, buffer: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], array: np.ndarray, offset: int = 0
    ) -> None:
        buffer[offset : offset + array.nbytes] = array.view(np.uint8)


@pytest.mark.parametrize("unwritten", [False, True])
def test_a_gpu_gives_poisoned_memory(monkeypatch: pytest.MonkeyPatch, unwritten: bool) -> None:
    """But where a tool looks for reads of what nothing wrote: poison would be a write."""
    monkeypatch.setenv(poison.UNWRITTEN, str(int(unwritten)))
    driver = Memory()
    poison.poison_memory(GpuDevice(None, driver, None))  # type: ignore[arg-type]
    given = driver.alloc(10)
    assert len(given) == 10
    assert given.any() != unwritten
    if not unwritten:
        assert np.isnan(given[:8].view(np.float32)).all()
