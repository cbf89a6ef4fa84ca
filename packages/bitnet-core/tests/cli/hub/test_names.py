"""Names of models, and which file is taken."""

from __future__ import annotations

import time

import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hub.choice import RemoteFile, choose, encoding
from bitnet.core.hub.errors import ModelNotFoundError
from bitnet.core.hub.names import HubName, parse
from bitnet.core.support import system


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("microsoft/bitnet-b1.58-2B-4T-gguf", HubName("microsoft/bitnet-b1.58-2B-4T-gguf")),
        ("hf:a/b", HubName("a/b")),
        ("hf:a/b:i2_s", HubName("a/b", "i2_s")),
        ("a/b:sub/model-i2_s.gguf", HubName("a/b", "sub/model-i2_s.gguf")),
    ],
)
def test_names(text: str, name: HubName) -> None:
    assert parse(text) == name
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "", "hf:", "name", "a/b/c", "a/", "/b", "../b", "a/..", "a/b--c", "a/b..c", "a/b.git", "a/.b", "-a/b", "a/b c",
        "http://host/a", "https://host/a/b", "hf:http://host/b", "a\\b", "a/b?x", "a/b#x", "a/b@x", "a/b\n", "a/é",
        "user:pw@host/b", "a/" + "b" * 96,
        "a/b:", "a/b:/etc/passwd", "a/b:../x.gguf", "a/b:x/../../y.gguf", "a/b:x//y.gguf", "a/b:x\\y.gguf", "a/b:x:y",
        "a/b:./x.gguf", "a/b:x\x1b.gguf", "a/b:x?.gguf", "a/b:http://host/x.gguf", "a/b:x/ ",
    ],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse(text)


@pytest.mark.parametrize(("text", "form"), [("a", "Write ORG/NAME or"), ("hf:a", "Write hf:ORG/NAME")])
def test_the_form_advised_is_the_one_in_use(text: str, form: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse(text)
    assert str(raised.value.hint).startswith(form)


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("ggml-model-i2_s.gguf", "i2_s"),
        ("Falcon3-7B-Instruct-1.58bit-TQ2_0.gguf", "tq2_0"),
        ("sub.q8_0/model.TQ1_0.gguf", "tq1_0"),
        ("Ternary-Bonsai-2-27B-PQ2_0.gguf", "pq2_0"),
        ("m-PTQ1_0.gguf", "ptq1_0"),
        ("Hy-MT1.5-1.8B-STQ1_0.gguf", "stq1_0"),
        ("model-Q4_K_M.gguf", "q4_k_m"),
        ("model-IQ2_XXS.gguf", "iq2_xxs"),
        ("ggml-model-tl2.gguf", "tl2"),
        ("model-bf16.gguf", "bf16"),
        ("ggml-model-i2_s-embed-q6_k.gguf", "i2_s"),
        ("TriLM_3.9B_Unpacked-TQ1_0-F16.gguf", "tq1_0"),
        ("Ternary-Bonsai-8B-Q2_0_g64.gguf", "q2_0"),
        ("Ternary-Bonsai-8B-Q2_0_g128_v2.gguf", "q2_0_g128"),
        ("m-TQ2_0_v2.gguf", "tq2_0"),
        ("m-f16-Q4_K_M.gguf", "q4_k_m"),
        ("model.gguf", ""),
        ("qwen3-4b.gguf", ""),
    ],
)
def test_encodings_in_names(path: str, known: str) -> None:
    assert encoding(path) == known


def files(*names: str, size: int = 1000) -> list[RemoteFile]:
    return [RemoteFile(name, size + i) for i, name in enumerate(names)]


def chosen(name: str, *paths: str) -> str:
    found = choose(parse(name), files(*paths))
    assert found is not None
    return found.file.path


def test_the_choice() -> None:
    every = ["m-f16.gguf", "m-Q4_K_M.gguf", "m-TQ1_0.gguf", "m-tq2_0.gguf", "m-i2_s.gguf", "m-f32.gguf", "README.md"]
    assert chosen("a/b", *every) == "m-i2_s.gguf"
    every.remove("m-i2_s.gguf")
    assert chosen("a/b", *every) == "m-tq2_0.gguf"
    assert chosen("a/b:TQ1_0", *every) == "m-TQ1_0.gguf"
    assert chosen("a/b:m-Q4_K_M.gguf", *every) == "m-Q4_K_M.gguf"  # who names a file gets it
    assert chosen("a/b", "m-i2_s.gguf", "mmproj-i2_s.gguf") == "m-i2_s.gguf"
    assert chosen("a/b", "x.gguf", "x-f16.gguf") == "x.gguf"
    groups = "x-F16.gguf", "x-Q2_0_g64.gguf", "x-Q2_0_g128.gguf"
    assert chosen("a/b", *groups) == "x-Q2_0_g64.gguf"
    for tag, path in (("q2_0", groups[1]), ("Q2_0_g64", groups[1]), ("q2_0_g128", groups[2])):
        assert chosen(f"a/b:{tag}", *groups) == path
    assert choose(parse("a/b"), files("model.safetensors")) is None


def test_what_does_not_fit_in_memory_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "memory_total", lambda: 5000)
    large, small = RemoteFile("large-i2_s.gguf", 6000), RemoteFile("small-tq1_0.gguf", 4000)
    found = choose(parse("a/b"), [large, small])
    assert found is not None
    assert found.file is small
    assert "large-i2_s.gguf would not fit in memory" in found.why


def test_no_file_that_runs() -> None:
    with pytest.raises(ModelNotFoundError, match="m-Q4_K_M"):
        choose(parse("a/b"), files("m-Q4_K_M.gguf", "m-q8_0.gguf"))
    with pytest.raises(ModelNotFoundError, match="no encoding 'f16'"):
        choose(parse("a/b:f16"), files("m-i2_s.gguf"))
    with pytest.raises(InvalidInputError, match="not a GGUF file"):
        choose(parse("a/b:README.md"), files("README.md", "m.gguf"))


def test_a_split_model_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part stands for it, whichever part is named; its size is that of all."""
    parts = [f"m-i2_s-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in ("a/b", "a/b:i2_s", *(f"a/b:{part}" for part in parts)):
        found = choose(parse(name), files(*reversed(parts), "m-f16.gguf"))
        assert found is not None
        assert [found.file.path, *(part.path for part in found.file.others)] == parts
    monkeypatch.setattr(system, "memory_total", lambda: 2500)
    assert chosen("a/b", *parts, "m-f16.gguf") == "m-f16.gguf"


@pytest.mark.parametrize("absent", [1, 2, 3])
def test_a_split_model_that_lacks_a_part(absent: int) -> None:
    parts = [f"m-i2_s-0000{i}-of-00003.gguf" for i in (1, 2, 3) if i != absent]
    for name in ("a/b", f"a/b:{parts[0]}", f"a/b:{parts[1]}"):
        with pytest.raises(ModelNotFoundError, match=f"lacks m-i2_s-0000{absent}-of-00003.gguf"):
            choose(parse(name), files(*parts, "mmproj-f16.gguf"))
    assert chosen("a/b", *parts, "m-f16.gguf") == "m-f16.gguf"


def test_a_listing_of_many_parts_costs_little() -> None:
    parts = [f"m-{i:05d}-of-99999.gguf" for i in range(1, 30_000)]
    begin = time.process_time()
    with pytest.raises(ModelNotFoundError, match="lacks m-30000-of-99999"):
        choose(parse("a/b"), files(*parts))
    assert time.process_time() - begin < 5
