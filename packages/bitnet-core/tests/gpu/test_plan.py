"""Which neighbouring operations may be launched together: no later operation needs a result that a group omits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from bitnet.core.gpu import Bucket
from bitnet.core.gpu.fusions import FUSIONS, FeedForward, Fusion, Layer, NormChoice, NormProduct, RopeAttention
from bitnet.core.gpu.ops.variants import ColumnMatmul
from bitnet.core.gpu.plan import candidates, lower
from bitnet.core.hal import (
    AddBias,
    Attention,
    CenterRows,
    DenseMatmul,
    Embed,
    GluNormQuant,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    RopeAppend,
    Sample,
    TernaryMatmul,
)

NORM = NormQuant("x", "w", 1e-5, "q", "s")
PRODUCT = TernaryMatmul("q", "s", ("m",), "out")
BUCKET = Bucket(1, 1, 512, logits=False, apart=True)


def groups_at(ops: Sequence[Any], bucket: Bucket = BUCKET) -> list[type[Fusion]]:
    return [type(group) for group in candidates(list(ops), 0, bucket)]


def test_a_product_takes_the_quantisation_before_it() -> None:
    assert groups_at([NORM, PRODUCT]) == [NormProduct]
    assert not groups_at([NORM, replace(PRODUCT, x="other")])
    assert not groups_at([NORM, replace(PRODUCT, scale="other")])


def test_not_where_another_product_takes_it_too() -> None:
    second = TernaryMatmul("q", "s", ("n",), "y")
    assert not groups_at([NORM, PRODUCT, second])
    assert groups_at([NORM, PRODUCT, NormQuant("y", "w", 1e-5, "q", "s"), second])


def test_not_where_the_product_writes_what_the_quantisation_reads() -> None:
    assert not groups_at([NORM, TernaryMatmul("q", "s", ("m",), "x", add=True)])
    assert not groups_at([NORM, TernaryMatmul("q", "s", ("m",), "x")])


def test_a_rotation_is_its_attentions_alone() -> None:
    rope, attention = RopeAppend("qkv", 1, 4, 2, 32, "cos", "sin"), Attention("qkv", "out", 1, 4, 2, 32)
    anew = TernaryMatmul("q", "s", ("m",), "qkv")
    assert groups_at([rope, attention, NORM, PRODUCT]) == [RopeAttention]
    assert not groups_at([rope, replace(attention, layer=0)])
    assert not groups_at([rope, replace(attention, qkv="other")])
    readers: tuple[Op, ...] = (replace(attention, out="more"), NormQuant("qkv", None, 1e-5, "q", "s"))
    for reader in readers:
        assert not groups_at([rope, attention, NORM, reader])
        assert groups_at([rope, attention, anew, reader])
    assert not groups_at([rope, attention, replace(anew, add=True)])
    assert not groups_at([rope, attention, replace(anew, column=4)]), "the other columns stay"


def test_a_rotation_stays_alone_where_another_token_reads_its_key() -> None:
    """A prompt, or a sequence that reads in a shared block what another appends in the same step."""
    ops = [RopeAppend("qkv", 1, 4, 2, 32, "cos", "sin"), Attention("qkv", "out", 1, 4, 2, 32), NORM, PRODUCT]
    assert groups_at(ops, Bucket(4, 4, 512, apart=True)) == [RopeAttention]
    assert not groups_at(ops, Bucket(4, 4, 512))


def test_gates_and_ups_that_are_added_to_are_no_group() -> None:
    glu, down = GluNormQuant("g", "w", 1e-5, "relu2", "h", "t"), TernaryMatmul("h", "t", ("d",), "x", add=True)
    up = TernaryMatmul("q", "s", ("m",), "g")
    assert FeedForward in groups_at([NORM, up, glu, down])
    assert FeedForward not in groups_at([NORM, replace(up, add=True), glu, down])


def test_a_head_without_logits_is_for_steps_whose_logits_nobody_reads() -> None:
    ops = [NormRows("x", "w", 1e-5, "last"), DenseMatmul("last", "head", "logits"), Sample("logits", "next")]
    assert NormChoice in groups_at(ops)
    assert NormChoice not in groups_at(ops, replace(BUCKET, logits=True))


@pytest.mark.parametrize("keep", [False, True])
def test_a_program_that_keeps_its_tensors_is_not_grouped(keep: bool) -> None:
    kinds = (NormQuant, TernaryMatmul, NormProduct)
    table: Any = {kind: lambda ctx, op, bucket, kind=kind: [kind] for kind in kinds}
    context: Any = SimpleNamespace(program=Program([NORM, PRODUCT], {}, {}, Limits(1)), keep=keep)
    launched: list[Any] = lower(context, BUCKET, table)
    assert launched == ([NormQuant, TernaryMatmul] if keep else [NormProduct])


def test_a_product_of_some_columns_is_not_grouped() -> None:
    """Unless a backend lowers it as others."""
    ops: list[Op] = [NORM, replace(PRODUCT, column=4)]
    kinds = (NormQuant, TernaryMatmul, ColumnMatmul, NormProduct)
    table: Any = {kind: lambda ctx, op, bucket, kind=kind: [kind] for kind in kinds}
    context: Any = SimpleNamespace(program=Program(ops, {}, {}, Limits(1)), keep=False)
    launched: list[Any] = lower(context, BUCKET, table)
    assert launched == [NormQuant, ColumnMatmul]


def test_a_layer_adds_to_what_its_norms_read() -> None:
    ops = layer("x", "x", 0)
    assert groups_at(ops)[0] is Layer
    for at, change in ((5, {"out": "y"}), (5, {"add": False}), (6, {"x": "y"}), (9, {"out": "y"}), (1, {"add": True})):
        changed: list[Any] = list(ops)
        changed[at] = replace(changed[at], **change)
        assert Layer not in groups_at(changed), change


def test_a_bias_or_a_centring_is_in_no_group() -> None:
    """The groups before and behind stay, and none reaches over it: a layer that has one is no :class:`Layer`."""
    ops: list[Any] = layer("x", "x", 0)
    bias, center = AddBias("qkv", "b"), CenterRows("x", "c")
    biased = [*ops[:2], bias, *ops[2:]]
    assert groups_at(biased) == [NormProduct]
    assert groups_at(biased[2:]) == []
    assert RopeAttention in groups_at(biased[3:])
    assert groups_at([*ops[:1], AddBias("q", "b"), *ops[1:]]) == []
    centered = [center, replace(NORM, x="c"), *ops[1:]]
    assert groups_at(centered) == []
    assert groups_at(centered[1:]) == [NormProduct]
    assert not groups_at([RopeAppend("qkv", 1, 4, 2, 32, "cos", "sin"), ops[3], bias, replace(ops[3], out="more")])


def layer(x: str, out: str, index: int, *, quant: str = "q") -> list[Op]:
    """A layer's operations; with ``x`` apart from ``out`` it is none that a :class:`Layer` takes."""
    return [
        NormQuant(x, "w", 1e-5, quant, "s"),
        TernaryMatmul(quant, "s", ("qkv",), "qkv"),
        RopeAppend("qkv", index, 4, 2, 32, "cos", "sin"),
        Attention("qkv", "attn", index, 4, 2, 32),
        NormQuant("attn", "w", 1e-5, "aq", "as"),
        TernaryMatmul("aq", "as", ("o",), out, add=True),
        NormQuant(x, "w", 1e-5, quant, "s"),
        TernaryMatmul(quant, "s", ("up",), "g"),
        GluNormQuant("g", "w", 1e-5, "relu2", "h", "t"),
        TernaryMatmul("h", "t", ("down",), out, add=True),
    ]


def random_program(rng: random.Random) -> list[Op]:
    """Layers and a head, some of whose operations are dropped, doubled, moved, or given other tensors of their type."""
    floats, ints, scales = ["x", "y", "qkv", "attn", "g"], ["q", "aq", "h"], ["s", "as", "t"]
    plain: list[Op] = [AddBias("qkv", "b"), AddBias("x", "b"), CenterRows("x", "y"), CenterRows("attn", "x")]
    ops: list[Any] = [Embed("table", "x")]
    for index in range(rng.randint(1, 3)):
        ops += layer("x", "x", index, quant=rng.choice(["q", "q", "aq"]))
    ops += [NormRows("x", "w", 1e-5, "last"), DenseMatmul("last", "head", "logits"), Sample("logits", "next")]
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(1, len(ops) - 1)
        match rng.randrange(6):
            case 5:
                ops.insert(at, rng.choice(plain))
            case 0:
                del ops[at]
            case 1:
                ops.insert(rng.randrange(1, len(ops) - 1), ops[at])
            case 3 if isinstance(ops[at], TernaryMatmul):
                ops[at] = replace(ops[at], add=not ops[at].add)
            case 2:
                ops[at], ops[at - 1] = ops[at - 1], ops[at]
            case _:
                kinds = {"x": floats, "out": floats, "qkv": floats, "gate_up": floats}
                if isinstance(ops[at], NormQuant | GluNormQuant):
                    kinds |= {"out": ints, "scale": scales}
                elif isinstance(ops[at], TernaryMatmul):
                    kinds |= {"x": ints, "scale": scales}
                else:
                    kinds = dict.fromkeys(("qkv",), floats)
                names = [name for name in kinds if hasattr(ops[at], name)]
                if names:
                    name = rng.choice(names)
                    ops[at] = replace(ops[at], **{name: rng.choice(kinds[name])})
    return ops


INPUTS: dict[type, tuple[str, ...]] = {
    Embed: (),
    RopeAppend: ("qkv",),
    Attention: ("qkv",),
    NormQuant: ("x",),
    GluNormQuant: ("gate_up",),
    TernaryMatmul: ("x", "scale"),
    NormRows: ("x",),
    DenseMatmul: ("x",),
    Sample: ("logits",),
    AddBias: ("x",),
    CenterRows: ("x",),
}
RESULTS: dict[type, tuple[str, ...]] = {
    NormQuant: ("out", "scale"),
    GluNormQuant: ("out", "scale"),
    RopeAppend: ("qkv",),
    AddBias: ("x",),
}
"""Fields that name what an operation reads and makes, as the contract has them and not as the plan does."""


def inputs(op: Any) -> list[str]:
    return [getattr(op, name) for name in INPUTS[type(op)]] + ([op.out] if getattr(op, "add", False) else [])


def results(op: Any) -> list[str]:
    return [getattr(op, name) for name in RESULTS.get(type(op), ("out",))]


class Values:
    """What tensors hold, as the number of the term that made it: who computes the same has the same numbers."""

    numbers: ClassVar[dict[Any, int]] = {}

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.seen: list[int] = []  # of every token that is chosen, and every key that is appended

    def run(self, op: Op, before: Op | None = None) -> None:
        """One operation on its inputs of now; in a group, on the results of the one before it, whatever their names."""
        taken = [self.held.get(name, name) for name in inputs(op)]
        if before is not None:
            made = [self.held[name] for name in results(before)]
            taken[: len(made)] = made
        number = self.numbers.setdefault((op, *taken), len(self.numbers))
        if isinstance(op, Sample | RopeAppend):
            self.seen.append(number)
        self.held |= {name: (place, number) for place, name in enumerate(results(op))}


def run_grouped(ops: Sequence[Op], taken: Callable[[Fusion], bool]) -> list[int]:
    """The program with every group that is taken as one: what that leaves out becomes a term of its own."""
    values, at = Values(), 0
    while at < len(ops):
        group = next(filter(taken, candidates(ops, at, BUCKET)), None)
        if group is None:
            values.run(ops[at])
            at += 1
            continue
        first = set(inputs(group.ops[0]))
        for op, before in zip(group.ops, (None, *group.ops), strict=False):
            values.run(op, before)
        kept = {name for op in group.kept for name in results(op)}
        assert not (group.AT_ONCE and first & kept), "some of its work-groups write what others still read"
        for name in {name for op in group.ops for name in results(op)} - kept:
            values.held[name] = ("left out", name, at)
        at += len(group.ops)
    return values.seen


def choices(rng: random.Random) -> Iterator[Callable[[Fusion], bool]]:
    yield lambda _: True
    for kind in FUSIONS:
        yield lambda group, kind=kind: type(group) is kind  # type: ignore[misc]
    yield lambda _: rng.random() < 0.5


@pytest.mark.parametrize("seed", range(8))
def test_a_program_computes_the_same_in_groups(seed: int) -> None:
    """Symbolically, over programs that are broken in every way: no chosen token's term has a part that was left out."""
    rng = random.Random(f"{seed} {random.random()}")
    for _ in range(60):
        ops = random_program(rng)
        alone = run_grouped(ops, lambda _: False)
        for taken in choices(rng):
            assert run_grouped(ops, taken) == alone, ops


def test_the_whole_of_a_model_is_grouped() -> None:
    """So that the random programs above are known to have groups in them."""
    ops = [Embed("table", "x"), *layer("x", "x", 0), *layer("x", "x", 1)]
    found = set()
    for at in range(len(ops)):
        found |= {type(group) for group in candidates(ops, at, BUCKET)}
    assert found >= {Layer, FeedForward, NormProduct, RopeAttention}
