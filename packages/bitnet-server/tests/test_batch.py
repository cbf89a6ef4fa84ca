"""``bitnet batch``: every row has exactly one answer, whatever ends a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitnet.core import load_model
from bitnet.core.errors import InvalidInputError
from bitnet.server.batch.rows import PATHS, keep_answered, read_rows
from bitnet.server.commands.batch import batch

Run = Callable[..., Result]


def row(id: str, question: str = "What is 17 + 25?", **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 12, **body}
    return {"custom_id": id, "method": "POST", "url": PATHS[0], "body": {"model": "gpt-anything", **asked}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(rows, *options)`` runs the command on ``in.jsonl`` with the demo model; answers are in ``out.jsonl``."""
    monkeypatch.chdir(tmp_path)

    def run(rows: list[Any], *options: str) -> Result:
        Path("in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        arguments = ["-i", "in.jsonl", "-o", "out.jsonl", "--device", "cpu", "-t", "1", *options]
        return CliRunner().invoke(batch, arguments)

    return run


def answers(file: str = "out.jsonl") -> dict[str, Any]:
    found = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "each row once"
    assert all(one["error"] is None for one in found)
    return {one["custom_id"]: one["response"] for one in found}


def test_each_row_gets_what_a_request_would(run: Run) -> None:
    """Of all three APIs; what is wrong with one is its answer, and the others go on."""
    sums = {str(n): (random.randrange(50), random.randrange(50)) for n in range(20)}
    rows = [row(id, f"What is {a} + {b}?") for id, (a, b) in sums.items()]
    rows.append({"custom_id": "text", "url": PATHS[1], "body": {"prompt": "Once", "max_tokens": 3, "temperature": 0}})
    rows.append({"custom_id": "response", "url": PATHS[2], "body": {"input": "What is 2 + 2?", "temperature": 0}})
    rows.append(row("wrong", top_p=7))
    done = run(rows, "-np", "4")
    assert done.exit_code == 0, done.output
    assert "1 of them are errors" in done.output
    found = answers()
    assert {*found} == {one["custom_id"] for one in rows}
    with load_model(device="cpu", threads=1) as model:
        for id, (a, b) in sums.items():
            want = model.chat([{"role": "user", "content": f"What is {a} + {b}?"}], temperature=0, max_tokens=12)
            assert found[id]["body"]["choices"][0]["message"]["content"] == want.text
        assert found["text"]["body"]["choices"][0]["text"] == model.generate("Once", temperature=0, max_tokens=3).text
    assert found["response"]["body"]["output"][0]["content"][0]["text"] == "2 + 2 = 4."
    assert (found["wrong"]["status_code"], found["wrong"]["body"]["error"]["param"]) == (400, "top_p")


def test_a_run_goes_on_where_one_ended(run: Run) -> None:
    """With a line that was cut short, an answer that failed in the server, and rows that are answered."""
    rows = [row(str(n)) for n in range(6)]
    run(rows)
    whole = Path("out.jsonl").read_text(encoding="utf-8").splitlines()
    failed = json.loads(whole[2])
    failed["response"]["status_code"] = 503
    cut = whole[3][: len(whole[3]) // 2]
    Path("out.jsonl").write_text("\n".join([*whole[:2], json.dumps(failed), cut]), encoding="utf-8")
    assert "out.jsonl is there already" in str(run(rows).exception)
    done = run(rows, "--resume")
    assert done.exit_code == 0, done.output
    assert "2 of 6 rows have their answers" in done.output
    assert Path("out.jsonl").read_text(encoding="utf-8").splitlines()[:2] == whole[:2]
    assert {id: one["status_code"] for id, one in answers().items()} == {str(n): 200 for n in range(6)}
    before = Path("out.jsonl").read_bytes()
    assert run(rows, "--resume").exit_code == 0
    assert Path("out.jsonl").read_bytes() == before


def test_an_interrupted_run_keeps_what_it_has(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet.server.batch.rows import Answers

    add = Answers.add

    def three(self: Any, *answer: Any) -> None:
        if len(Path("out.jsonl").read_text(encoding="utf-8").splitlines()) == 3:
            raise KeyboardInterrupt
        add(self, *answer)

    rows = [row(str(n)) for n in range(30)]
    with monkeypatch.context() as patch:
        patch.setattr(Answers, "add", three)
        done = run(rows, "-np", "2")
    assert done.exit_code != 0
    assert "the answers so far are in out.jsonl" in done.output
    assert len(answers()) == 3
    assert run(rows, "--resume").exit_code == 0
    assert {*answers()} == {str(n) for n in range(30)}


GOOD = json.dumps(row("1"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no rows"),
        ("\n \n", "has no rows"),
        (f"{GOOD}\n{GOOD}\n", "line 2 of .* has the custom_id '1' of an earlier line"),
        (f"{GOOD}\n{{", "line 2 of .* is not JSON"),
        ("[" * 100_000, "line 1 of .* is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "has no custom_id"),
        (json.dumps({**row("1"), "custom_id": 1}), "has no custom_id"),
        (json.dumps({**row("1"), "method": "GET"}), "has the method 'GET'; it must be POST"),
        (json.dumps({**row("1"), "url": "/v1/embeddings"}), "has the url '/v1/embeddings'; it must be one of"),
        (json.dumps({**row("1"), "body": "x"}), "has no body"),
        (json.dumps(row("1", stream=True)), "asks for a stream"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_anything_is_loaded(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=why):
        read_rows(file)


@pytest.mark.parametrize("text", ["a diary\n", '{"custom_id": "9", "response": {"status_code": 200}}\n', "[1]\n2\n"])
def test_a_file_that_is_no_answer_to_the_batch_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match="Name another file with -o"):
        keep_answered(file, ["1", "2"])
    assert file.read_text(encoding="utf-8") == text


def test_nothing_is_left_where_nothing_was_answered(run: Run) -> None:
    done = run([row("1")], "--model", "absent.gguf")
    assert done.exit_code != 0
    assert not Path("out.jsonl").exists()
