"""``bitnet receipt``: show and verify records of what computed an answer, rerun them, and make signing keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import compile_progress, note, print_json, read_text, say
from bitnet.core.cli.options import FileName, ModelName, device_option, strict_option, utf8_text, verbose_option
from bitnet.core.errors import ReceiptError, brief

if TYPE_CHECKING:
    from bitnet.core.receipts import Verdict

SHOWN_KEY = 16
"""Hex digits of a key's id that are printed."""


@click.group(no_args_is_help=False)
def receipt() -> None:
    """Check, show or rerun the receipts of 'bitnet run --receipt', and make keys to sign them.

    By itself a receipt proves nothing: anyone can make one up. A signature proves who wrote it, and --rerun proves that
    the model gives this answer. Only trust in the signer vouches for the device and the speed.
    """


@receipt.command()
@click.argument("file", type=FileName())
@click.option(
    "-m",
    "--model",
    metavar="FILE",
    type=ModelName(),
    help="Check that it was made with this model.  [default with --rerun: the one in this package, if it was that]",
)
@click.option("--prompt", metavar="TEXT|@FILE", callback=utf8_text, help="Check that this was the prompt (@-: stdin).")
@click.option("--system", metavar="TEXT|@FILE", callback=utf8_text, help="System message of that prompt.")
@click.option("--answer", metavar="TEXT|@FILE", callback=utf8_text, help="Check that this was the answer (@-: stdin).")
@click.option(
    "--key",
    "keys",
    metavar="FILE",
    multiple=True,
    type=FileName(),
    help="Public key (.pub) that must have signed it; if repeated, any one of them.",
)
@click.option("--rerun", "again", is_flag=True, help="Generate again from --prompt and -m, and compare the tokens.")
@device_option
@strict_option
@verbose_option
def verify(
    file: Path,
    model: Path | str | None,
    prompt: str | None,
    system: str | None,
    answer: str | None,
    keys: tuple[Path, ...],
    again: bool,
    device: str | None,
    strict: bool | None,
) -> None:
    """Check everything in a receipt that can be checked, and say what was and what was not.

    Without options, it only checks that the receipt does not contradict itself. -m compares the model file, --prompt
    and --answer the texts, --key the signature. --rerun computes the answer again, on the same CPU level or GPU backend
    unless --device names another. The exit status is 6 if the receipt does not hold, 4 if the model cannot be read, and
    2 if another file cannot.

    \b
    bitnet receipt verify run.json --key ours.pub
    bitnet receipt verify run.json -m model.gguf --prompt "What is 17 + 25?" --answer @answer.txt
    bitnet receipt verify run.json -m model.gguf --prompt @prompt.txt --rerun
    """
    from bitnet.core import receipts
    from bitnet.core.hub import local_path

    if again and prompt is None:
        raise click.UsageError("--rerun needs --prompt, as the receipt has only the prompt's hash.")
    if device is not None and not again:
        raise click.UsageError("--device needs --rerun.")
    if system is not None and prompt is None:
        raise click.UsageError("--system needs --prompt.")
    model = None if model is None else local_path(model, tell=note)
    document = receipts.load(file)
    receipts.verify(document)  # check its form before reading its fields
    asked, answered = _asked(document, prompt, system), _answered(document, answer)
    compared = None if again else model  # with --rerun, the model file is compared during the rerun
    verdict = receipts.verify(document, model=compared, prompt=asked, answer=answered, keys=keys)
    ran_on = None
    if again:
        from bitnet.core.evaluation.replay import rerun

        model = _model_of(document, model)
        with compile_progress():
            ran_on = rerun(document, asked, model=model, device=device, strict=strict).name
    _tell(file, document, verdict, model=model, asked=asked, answered=answered, ran_on=ran_on)


@receipt.command()
@click.argument("file", type=FileName())
@verbose_option
def show(file: Path) -> None:
    """Print a receipt without checking it."""
    from bitnet.core import receipts

    print_json(receipts.load(file))


@receipt.command()
@click.argument("file", type=FileName())
@verbose_option
def keygen(file: Path) -> None:
    """Make a key to sign receipts with.

    FILE receives the private key, which only you may read; FILE.pub the public one, for those who verify. Existing
    files are not replaced. To sign, use 'bitnet run --receipt-key FILE' or set BITNET_RECEIPT_KEY=FILE.
    """
    from bitnet.core import receipts

    made = receipts.keygen(file)
    say(f"key {made[:SHOWN_KEY]}: private in {file}, public in {file}.pub")


def _text(value: str) -> tuple[str, ...]:
    """The texts an option may stand for: its own, or a file's with and without the final newline."""
    if not value.startswith("@"):
        return (value,)
    name = value[1:]
    text = read_text(None if name == "-" else Path(name), hint="Put a text that begins with @ in a file.")
    return (text, text.removesuffix("\n").removesuffix("\r"))


def _asked(document: dict[str, Any], prompt: str | None, system: str | None) -> Any:
    """The prompt in the form recorded in the receipt: the first possible form whose hash matches."""
    if prompt is None:
        return None
    request = document["request"]
    forms = [
        _message_list(text, system) if request["messages"] and system is not None else text for text in _text(prompt)
    ]
    if system is not None and not request["messages"]:
        raise ReceiptError("The receipt does not hold: its prompt has no system message.")
    return _fitting(document, "prompt", forms)


def _answered(document: dict[str, Any], answer: str | None) -> str | None:
    return None if answer is None else _fitting(document, "answer", list(_text(answer)))


def _message_list(text: str, system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": _text(system)[-1]}, {"role": "user", "content": text}]


def _fitting(document: dict[str, Any], name: str, forms: list[Any]) -> Any:
    from bitnet.core import receipts

    for form in forms[:-1]:
        try:
            receipts.verify(document, **{name: form})
        except ReceiptError:
            continue
        return form
    return forms[-1]


def _model_of(document: dict[str, Any], model: Path | None) -> Path:
    """The model file for the rerun: the one named, or the demo model if the receipt is of that."""
    if model is not None:
        return model
    from bitnet.core.model.default import default_model_path
    from bitnet.core.support.mapped import MappedFile

    path = default_model_path()
    if MappedFile(path).sha256() != document["model_info"]["sha256"]:
        raise click.UsageError("--rerun needs -m FILE, as the receipt's model is not the one in this package.")
    return path


def _tell(
    file: Path,
    document: dict[str, Any],
    verdict: Verdict,
    *,
    model: Path | None,
    asked: Any,
    answered: str | None,
    ran_on: str | None,
) -> None:
    """Print which checks were made and which were not."""
    numbers, name = document["performance_baseline"], brief(document["model_info"]["name"])
    say(f"{file}: nothing in it contradicts itself")
    lines = {
        "says": f"{numbers['tokens_generated']} tokens at {numbers['tokens_per_second']:.1f}/s "
        f"on {document['compute_path']} with {name}",
        "signature": _signature(document, verdict),
        "model": "not compared (-m FILE)" if model is None else f"{model} is the file that it names, by SHA-256",
        "prompt": "not compared (--prompt)" if asked is None else "the one given, by SHA-256",
        "answer": "not compared (--answer)" if answered is None else "the one given, by SHA-256",
        "rerun": "not run again (--rerun)"
        if ran_on is None
        else f"the same {len(document['answer']['tokens'])} tokens on {ran_on}; speed is not compared",
    }
    for label, text in lines.items():
        say(f"  {label:<10} {text}")
    for unchecked in verdict.unchecked:
        note(f"not checked: {unchecked}")


def _signature(document: dict[str, Any], verdict: Verdict) -> str:
    if document["signature"] is None:
        return "UNSIGNED: anyone could have written it, with any device, speed and model"
    key = document["signature"]["key"][:SHOWN_KEY]
    if verdict.signed_by is None:
        return f"NOT CHECKED: the file claims the key {key}, but anyone could have written it"
    if verdict.trusted:
        return f"by the key {key}, one of those given"
    return f"by the key {key}, which may be anyone's: name the keys you trust with --key"
