"""Receipts of real runs hold; edited ones do not, however carefully they are edited.

Long, because the list of edits, one for each field and rule of a receipt, belongs beside the test that tries them.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from bitnet.core import load_model, receipts
from bitnet.core.devices.registry import installed
from bitnet.core.devices.select import select_device
from bitnet.core.engine import Completion, GenerationOptions
from bitnet.core.engine.results import Timings
from bitnet.core.errors import BitNetError, ModelFileError, ReceiptError
from bitnet.core.hal.probe import TEST_DRIVER
from bitnet.core.model.file import open_model
from bitnet.core.receipts.schema import problems
from bitnet.core.support import env
from bitnet.core.testing.lifecycle import Session

SCHEMA = json.loads((files("bitnet.core.receipts") / "receipt.schema.json").read_text())
HOLDS = receipts.Verdict(signed_by=None, trusted=False, unchecked=())
CPUS = [info.name for info in installed()["cpu"].report().probe.devices]


def resealed(document: dict[str, Any]) -> dict[str, Any]:
    """As an editor who knows how would leave it: with the digest of what it says now."""
    return {**document, "digest": receipts.digest(document)}


@pytest.fixture(scope="module")
def kernels() -> dict[str, tuple[str, ...]]:
    """What each CPU device recorded when it ran a small model."""
    found = {}
    for name in CPUS:
        device = select_device(name).open()
        session = Session(device, 0)
        session.prefill([0])
        found[name] = session.executable.kernels
        device.close()
    return found


@pytest.fixture
def make(tmp_path: Path, kernels: dict[str, tuple[str, ...]], tiny: Path) -> Callable[..., dict[str, Any]]:
    """``make(device)``: a receipt of a generation with random timings on a CPU device."""

    def make(
        name: str = CPUS[0],
        *,
        rng: random.Random | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        rng = rng or random.Random(os.urandom(8))
        path = tmp_path / "model.gguf"
        if not path.exists():
            shutil.copy(tiny, path)
        count = rng.choice([0, 1, 2, 50]) if tokens is None else tokens
        scale = seconds or 10 ** rng.uniform(-7, 3)
        times = sorted(rng.uniform(0.1, 1) * scale for _ in range(count))
        timings = Timings(rng.randint(1, 600), 0, 0.0, tuple(times), (times[-1] if times else scale) * 1.01)
        options = GenerationOptions(max_tokens=count or 1, logit_bias={3: -float("inf")}, stop=["###"])
        answer = tuple(rng.randrange(512) for _ in range(count))
        reason: Any = "length" if count else "cancelled"
        completion = Completion("", answer, reason, None, None, (1,), rng.getrandbits(64), timings, options)
        selection = select_device(name)
        prompts: list[Any] = ["Hello", [{"role": "user", "content": "Hello"}], [1]]
        setup = {"context": 4096, "kv_dtype": "f16", "max_seqs": 1, "step_tokens": 512, "i2s_layout": "official"}
        return receipts.build(
            file=open_model(path),
            device=selection.info,
            selection=selection,
            kernels=kernels[name],
            completion=completion,
            setup=setup,
            variables=env.snapshot(),
            prompt=rng.choice(prompts),
        )

    return make


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a document is, containers too."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*place, key))


def at(document: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        document = document[key]
    return document


def edited(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    at(document, place[:-1])[place[-1]] = value
    return document


@pytest.mark.parametrize("device", CPUS)
def test_a_real_one_holds(make: Any, device: str, rng_seed: int, tmp_path: Path) -> None:
    rng = random.Random(rng_seed)
    for _ in range(12):
        document = make(device, rng=rng)
        receipts.write(tmp_path / "receipt.json", document)
        again = receipts.load(tmp_path / "receipt.json")
        assert again == document
        assert receipts.verify(again, model=tmp_path / "model.gguf") == HOLDS
        jsonschema.validate(again, SCHEMA)


def test_of_a_model_that_ran(tiny: Path) -> None:
    path = tiny
    with load_model(path, device="cpu") as model:
        completion = model.generate([1, 2, 3], max_tokens=5, temperature=0.7, seed=11)
        document = model.receipt(completion)
        there = model.receipt(completion, replica={"node": "192.0.2.7", "id": "engine#1"})
        elsewhere = model.receipt(completion, replica={"node": "192.0.2.7"})
    assert receipts.verify(document, model=path) == HOLDS
    assert receipts.verify(there, model=path) == HOLDS
    assert there["environment"]["replica"] == {"node": "192.0.2.7", "id": "engine#1"}
    assert "replica" not in document["environment"]
    with pytest.raises(ReceiptError, match="id"):
        receipts.verify(elsewhere)
    assert document["seed"] == 11
    assert document["backend_summary"] == f"requested=cpu detected=[cpu] selected={document['compute_path']}"
    numbers, info = document["performance_baseline"], document["model_info"]
    assert (numbers["tokens_generated"], numbers["prompt_tokens"]) == (5, 3)
    assert info["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (info["layers"], info["hidden_size"], info["size"]) == (1, 128, path.stat().st_size)
    assert any("ternary_matmul" in name for name in document["kernels"])


def test_every_edit_shows(make: Any, rng_seed: int) -> None:
    """One value changed, removed or added, anywhere."""
    rng = random.Random(rng_seed)
    document = make(tokens=5, seconds=0.3)
    for place in leaves(document):
        value = at(document, place)
        others: list[Any] = [
            None,
            "x",
            7,
            -1,
            0.5,
            True,
            False,
            [],
            {},
            str(value) + " ",
            value * 2 if isinstance(value, int | float | str) else 0,
        ]
        for other in rng.sample(others, 4):
            if other == value and type(other) is type(value):
                continue
            with pytest.raises(ReceiptError):
                receipts.verify(edited(document, place, other))
        removed = copy.deepcopy(document)
        del at(removed, place[:-1])[place[-1]]
        with pytest.raises(ReceiptError):
            receipts.verify(removed)
        if isinstance(value, dict):
            with pytest.raises(ReceiptError):
                receipts.verify(edited(document, (*place, "extra"), "x"))
    for place in (p for p in leaves(document) if isinstance(at(document, p), int | float)):
        with pytest.raises(ReceiptError, match=r"it was changed after it was made|is not|is too|not of type"):
            receipts.verify(edited(document, place, at(document, place) + 1))


def path_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    backend = path.partition(":")[0]
    summary = f"requested=auto detected=[{backend}, cpu] selected={path}"
    return {**document, "compute_path": path, "backend": backend, "backend_summary": summary}


def numbers(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda d: {**d, "performance_baseline": {**d["performance_baseline"], **changes}}


def environment(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda d: {**d, "environment": {**d["environment"], **changes}}


EDITS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "another backend": (lambda d: path_of(d, "cuda:0"), "did not run on cuda:0"),
    "another backend, its device too": (
        lambda d: environment(device={**d["environment"]["device"], "type": "discrete"})(path_of(d, "opencl:0")),
        "did not run on opencl:0",
    ),
    "another level": (lambda d: path_of(d, "cpu:neon"), "did not run on cpu:neon"),
    "only the backend": (lambda d: {**d, "backend": "cuda"}, "backend is cuda"),
    "only the path": (lambda d: {**d, "compute_path": "cuda:0"}, "backend_summary says cpu:"),
    "only the line": (
        lambda d: {**d, "backend_summary": "requested=auto detected=[cpu] selected=cuda:0"},
        "backend_summary says cuda:0",
    ),
    "no start-up line": (lambda d: {**d, "backend_summary": "selected=cuda:0"}, "backend_summary"),
    "not detected": (
        lambda d: {**d, "backend_summary": f"requested=auto detected=[cuda] selected={d['compute_path']}"},
        "was selected but not detected",
    ),
    "invented kernels": (
        lambda d: {**d, "kernels": [*d["kernels"], f"warp_drive_{d['compute_path'][4:]}"]},
        "cpu has no kernel warp_drive_",
    ),
    "kernels of a GPU": (lambda d: {**d, "kernels": [*d["kernels"], "ternary_matmul_cuda"]}, "did not run on cpu:"),
    "a kernel twice": (lambda d: {**d, "kernels": d["kernels"] * 2}, "item twice"),
    "no kernels": (lambda d: {**d, "kernels": []}, "too few"),
    "faster": (numbers(tokens_per_second=1e6), "tokens/s, not 1000000.0"),
    "a little faster": (
        lambda d: numbers(tokens_per_second=d["performance_baseline"]["tokens_per_second"] * 1.01)(d), "tokens/s, not",
    ),
    "faster decode": (numbers(decode_tokens_per_second=1e6), "decode_tokens_per_second is 1000000.0"),
    "no decode": (numbers(decode_tokens_per_second=None), "decode_tokens_per_second is None"),
    "less time": (numbers(total_time_ms=0.001), "first_token_latency_ms"),
    "no time": (numbers(total_time_ms=0), "too small"),
    "negative time": (numbers(total_time_ms=-5.0), "too small"),
    "infinite": (numbers(tokens_per_second=float("inf")), "is not a number"),
    "not a number": (numbers(tokens_per_second=float("nan")), "is not a number"),
    "an immense integer": (numbers(tokens_generated=10**400), "too large"),
    "more tokens": (numbers(tokens_generated=10**6), "tokens/s, not"),
    "half a token": (numbers(tokens_generated=4.5), "not of type integer"),
    "tokens out of nothing": (numbers(first_token_latency_ms=None), "do not go with"),
    "no tokens": (numbers(tokens_generated=0), "do not go with"),
    "first after last": (numbers(first_token_latency_ms=1e11), "is more than total_time_ms"),
    "fake": (lambda d: {**d, "fake": True}, "made with a fake device"),
    "fake by its variable": (
        environment(variables={"BITNET_GPU_FAKE": "cuda"}), r"made with a fake device \(BITNET_GPU_FAKE='cuda'\)",
    ),
    "a test driver": (
        lambda d: environment(device={**d["environment"]["device"], "vendor": TEST_DRIVER})(d),
        "made with a test driver",
    ),
    "tomorrow": (
        lambda d: {**d, "timestamp": (datetime.now(timezone.utc) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")},
        "is in the future",
    ),
    "no such day": (lambda d: {**d, "timestamp": "2025-02-30T12:00:00Z"}, "there is no such time"),
    "local time": (lambda d: {**d, "timestamp": "2025-02-20T12:00:00+01:00"}, "timestamp"),
    "a hash that is none": (lambda d: edited(d, ("model_info", "sha256"), "0" * 63), "model_info.sha256"),
    "no layers": (lambda d: edited(d, ("model_info", "layers"), 0), "model_info.layers is 0"),
    "another schema": (
        lambda d: {**d, "schema_version": "1.0.0"},
        r"schema_version is 1\.0\.0, but this version of bitnet reads only 2\.0\.0",
    ),
    "asked for the CPU, got a GPU": (
        lambda d: {**path_of(d, "cuda:0"), "backend_summary": "requested=cpu detected=[cuda, cpu] selected=cuda:0"},
        "cpu was requested; cuda:0 cannot have been selected",
    ),
    "a fallback that strict mode forbids": (
        lambda d: {
            **d, "strict": True, "backend_summary": f"requested=gpu detected=[cpu] selected={d['compute_path']}",
        },
        "gpu was requested; cpu:.* cannot have been selected",
    ),
    "a CPU that is a discrete GPU": (
        lambda d: environment(device={**d["environment"]["device"], "type": "discrete"})(d), "is said to be discrete",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_with_a_fitting_digest_shows_all_the_same(make: Any, name: str) -> None:
    edit, message = EDITS[name]
    document = edit(make(tokens=5, seconds=0.3))
    with pytest.raises(ReceiptError, match=message) as caught:
        receipts.verify(document if "number" in name or name == "infinite" else resealed(document))
    assert caught.value.exit_code == 6


def test_a_fallback_is_no_lie(make: Any) -> None:
    document = make(tokens=5)
    for request in ("gpu", "cuda:1", "GPU-01234567-89ab-cdef-0123-456789abcdef", "cpu", document["compute_path"]):
        line = f"requested={request} detected=[cpu] selected={document['compute_path']}"
        assert receipts.verify(resealed({**document, "backend_summary": line})) == HOLDS


@pytest.mark.parametrize("value", ["cuda", "none"])
def test_one_made_with_a_fake_says_so_and_does_not_hold(make: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BITNET_GPU_FAKE", value)
    document = make()
    assert document["fake"] is True
    assert document["environment"]["variables"]["BITNET_GPU_FAKE"] == value
    with pytest.raises(ReceiptError, match="made with a fake device"):
        receipts.verify(document)


def test_what_cannot_be_checked_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    document = make(tokens=5)
    kernels = [name.rsplit("_", 1)[0] + "_acme" for name in document["kernels"] if "vnni" not in name]
    device = {**document["environment"]["device"], "type": "discrete"}
    foreign = environment(device=device)({**path_of(document, "acme:0"), "kernels": list(dict.fromkeys(kernels))})
    assert receipts.verify(resealed(foreign)).unchecked == ("acme is not installed here: its list of kernels",)
    older = environment(packages={"bitnet-core": "0.0.1"})(document)
    (unchecked,) = receipts.verify(resealed({**older, "kernels": [f"new_{document['compute_path'][4:]}"]})).unchecked
    assert unchecked.startswith("bitnet-core ")
    assert unchecked.endswith("is installed here, not '0.0.1': its list of kernels")
    monkeypatch.setattr(installed()["cpu"], "backend", lambda: 1 / 0)
    assert receipts.verify(document).unchecked == ("cpu does not work here (division by zero): its list of kernels",)


def test_the_model_file_is_compared(make: Any, tmp_path: Path) -> None:
    document = make()
    (tmp_path / "model.gguf").write_bytes(b"another")
    assert receipts.verify(document) == HOLDS
    with pytest.raises(ReceiptError, match="is not the model it was made with"):
        receipts.verify(document, model=tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="absent: cannot be opened: No such file"):
        receipts.verify(document, model=tmp_path / "absent")


def test_variables_that_are_not_ours_stay_out(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_API_KEY", "hunter2")
    monkeypatch.setenv("AWS_SECRET", "hunter2")
    monkeypatch.setenv("BITNET_THREADS", "2")
    document = make()
    assert "hunter2" not in json.dumps(document)
    assert document["environment"]["variables"]["BITNET_THREADS"] == "2"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"seed": NaN}', b'{"seed": 1, "seed": 2}', b'"\\ud800"x',
        b" " * (1 << 22) + b"{}", b"{" + b"1" * 10_000, b"1" * 10**6, b"[1e", b"{'a': 1}",
    ],
)  # fmt: skip
def test_files_that_are_no_receipts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ReceiptError, match=r"r\.json is not a receipt"):
        receipts.load(path)


@pytest.mark.parametrize("document", [None, 3, [], {}, "x", [[]], {"schema_version": "2.0.0"}, {1: 2}])
def test_documents_that_are_no_receipts(document: Any) -> None:
    with pytest.raises(ReceiptError, match="does not hold"):
        receipts.verify(document)


def test_writing(make: Any, tmp_path: Path) -> None:
    document = make()
    target = tmp_path / "r.json"
    target.write_text("old")
    target.chmod(0o644)
    receipts.write(target, document)
    assert receipts.load(target) == document
    with pytest.raises(BitNetError, match="cannot be written"):
        receipts.write(tmp_path / "absent" / "r.json", document)
    with pytest.raises(ValueError, match="not JSON compliant"):
        receipts.write(target, {"x": float("nan")})
    assert receipts.load(target) == document
    odd = edited(document, ("model_info", "path"), os.fsdecode(b"/m\xff.gguf"))
    receipts.write(target, resealed(odd))
    assert receipts.verify(receipts.load(target)) == HOLDS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "r.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no device files")
def test_a_device_file_is_written_to_and_not_replaced(make: Any, python: Any, tmp_path: Path) -> None:
    link = tmp_path / "out"
    link.symlink_to("/dev/stdout")
    (tmp_path / "doc.json").write_text(json.dumps(make()))
    ran = python(
        f"""
        import json
        from bitnet.core import receipts
        for path in ({str(link)!r}, "/dev/null"):
            receipts.write(path, json.load(open({str(tmp_path / "doc.json")!r})))
        """
    )
    assert json.loads(ran.out) == json.loads((tmp_path / "doc.json").read_text())
    assert link.is_symlink()
    assert Path("/dev/null").is_char_device()


def test_our_reading_of_the_schema_is_the_standards(make: Any, rng_seed: int) -> None:
    """On random documents near to receipts, jsonschema finds a fault exactly where we do."""
    rng = random.Random(rng_seed)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    simple = [None, True, False, 0, 1, -1, 5.0, 5.5, 1e13, 10**30, "", "x", "cpu:avx2", "discrete"]
    values: list[Any] = [*simple, [], ["a", "a"], ["a", 1], {}, {"a": 1}, {"a": "b"}]
    verdicts: set[bool] = set()
    receipts = [make(rng=rng) for _ in range(3)]
    document = receipts[0]
    for _ in range(1500):
        document = copy.deepcopy(document)
        place = rng.choice(list(leaves(document)))
        parent = at(document, place[:-1])
        action = rng.random()
        if action < 0.7:
            parent[place[-1]] = rng.choice(values)
        elif action < 0.8:
            del parent[place[-1]]
        elif isinstance(parent, dict):
            parent["extra"] = rng.choice(values)
        ours, theirs = list(problems(document, SCHEMA)), list(validator.iter_errors(document))
        assert bool(ours) == bool(theirs), (ours, theirs)
        verdicts.add(bool(ours))
        if ours:
            document = rng.choice(receipts)
    assert verdicts == {True, False}


@pytest.fixture(scope="session")
def random_model() -> ModuleType:
    """``tools/make_random_model.py``."""
    path = Path(__file__).resolve().parents[4] / "tools" / "make_random_model.py"
    spec = importlib.util.spec_from_file_location("make_random_model_for_receipts", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(random_model: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one small layer."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    shape = random_model.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512, context=64)
    random_model.make_model(path, shape, seed=1)
    return path
