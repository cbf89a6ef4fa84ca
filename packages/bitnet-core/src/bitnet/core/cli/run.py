"""``bitnet run``: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import Shown, note, print_json, read_text, say, seconds
from bitnet.core.cli.options import (
    FileName,
    context_option,
    json_option,
    load,
    model_options,
    sampling,
    sampling_options,
    system_option,
    thinking_options,
    utf8_text,
)
from bitnet.core.errors import InvalidInputError
from bitnet.core.support import env

if TYPE_CHECKING:
    from bitnet.core.api import Model
    from bitnet.core.engine import Completion, Request


class _Run(click.Command):
    """Explains the error if a prompt lacks quotes, or if a model file is given in place of the prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            message = f"{error.message.rstrip('.')}. Put the prompt in quotes; -m names a model file."
            raise click.UsageError(message, ctx) from None


@click.command(cls=_Run)
@click.argument("prompt", required=False, callback=utf8_text)
@click.option(
    "-p", "--prompt", "prompt_option", metavar="TEXT", callback=utf8_text, help="The prompt, in place of the argument."
)
@click.option("-f", "--file", "prompt_file", metavar="FILE", type=FileName(), help="Read the prompt from a file.")
@system_option
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@model_options
@context_option
@sampling_options
@thinking_options
@click.option(
    "--logprobs", metavar="N", type=int, help="Print each token's log-probability, and the N likeliest alternatives."
)
@click.option("--receipt", metavar="FILE", type=FileName(), help="Record what computed this answer, as JSON.")
@click.option(
    "--receipt-key",
    metavar="FILE",
    type=FileName(),
    help="Sign the receipt with this private key ('bitnet receipt keygen').  [default: BITNET_RECEIPT_KEY]",
)
@json_option
def run(
    prompt: str | None,
    prompt_option: str | None,
    prompt_file: Path | None,
    system: str | None,
    raw: bool,
    hide_thinking: bool,
    logprobs: int | None,
    receipt: Path | None,
    receipt_key: Path | None,
    as_json: bool,
    **params: Any,
) -> None:
    """Answer one prompt, printing the answer as it is generated.

    A model that thinks first has its thought shown dimmed on a terminal; files and pipes get the answer alone.

    The prompt is the argument, or comes from --file, or from standard input ("-", or a pipe). The model's chat template
    is applied if it has one.

    \b
    bitnet run "What is 17 + 25?"
    bitnet run -m model.gguf --temp 0.7 --top-p 0.9 -n 200 "Tell me a story."
    git diff | bitnet run -m model.gguf --system "Summarise this change."
    """
    text = _prompt(prompt, prompt_option, prompt_file)
    if raw and system is not None:
        raise click.UsageError("--system and --raw exclude each other: --raw skips the chat template.")
    if raw and (params["no_think"] or params["reasoning_budget"] is not None):
        raise click.UsageError("--no-think and --reasoning-budget need the chat template, which --raw skips.")
    if receipt is not None and not receipt.parent.is_dir():
        raise InvalidInputError(f"--receipt {receipt}: the folder {receipt.parent} does not exist.")
    if receipt is not None and receipt.is_dir():
        raise InvalidInputError(f"--receipt {receipt} is a folder; name the file to write.")
    _check_key(receipt, receipt_key)
    if not raw:
        expect_template()  # before the imports of the next line
    options = sampling(params, logprobs=logprobs)
    with load(params, max_seqs=1) as model:
        request = _request(model, text, system, raw)
        with _begin(model, request, options) as stream:
            completion = _write(stream, quiet=as_json, thoughts=not hide_thinking)
        if as_json:
            print_json(_document(model, completion))
        else:
            if completion.logprobs is not None:
                _print_logprobs(model, completion)
            note(summary(model, completion))
        if receipt is not None:  # last, so that a failure to write it does not lose the answer
            _save(receipt, model.receipt(completion, prompt=request, key=receipt_key))


def _prompt(argument: str | None, option: str | None, file: Path | None) -> str:
    if sum(source is not None for source in (argument, option, file)) > 1:
        raise click.UsageError("give the prompt once: as the argument, with --prompt, or with --file.")
    text = argument if argument is not None else option
    if text is None and file is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt.")
    if text is None or text == "-":
        # Files and pipes end in a newline that is not part of the prompt.
        text = read_text(None if file is None or str(file) == "-" else file).removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidInputError("the prompt is empty.")
    return text


def expect_template() -> None:
    """Start the renderer of chat templates while libraries are imported and the model loads."""
    from bitnet.core.text import sandbox

    sandbox.warm()


def _request(model: Model, text: str, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """The text for the model to continue, or the conversation for it to answer."""
    if raw or model.chat_template is None:
        if system is not None:
            raise InvalidInputError(f"{model.config.name} has no chat template, so --system cannot be used.")
        return text
    return [*([] if system is None else [{"role": "system", "content": system}]), {"role": "user", "content": text}]


def _begin(model: Model, prompt: str | list[dict[str, str]], options: Any) -> Request:
    return model.stream(prompt, **options) if isinstance(prompt, str) else model.chat_stream(prompt, **options)


def _write(stream: Request, *, quiet: bool, thoughts: bool) -> Completion:
    shown = Shown(thoughts=thoughts)
    with shown:
        for chunk in stream:
            if not quiet:
                shown.chunk(chunk.reasoning, chunk.text)
    if not quiet:
        say("")
    assert stream.completion is not None
    return stream.completion


def _check_key(receipt: Path | None, key: Path | None) -> None:
    """Reject a key that cannot be used before anything is computed."""
    if receipt is None:
        if key is not None:
            raise click.UsageError("--receipt-key needs --receipt.")
        return
    if name := key or env.text("BITNET_RECEIPT_KEY"):
        from bitnet.core.receipts import private_key

        private_key(name)


def _save(path: Path, receipt: dict[str, Any]) -> None:
    from bitnet.core.receipts import write

    write(path, receipt)


def _document(model: Model, completion: Completion) -> dict[str, Any]:
    timings = completion.timings
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [
            {
                "token": entry.token,
                "text": _token_text(model, entry.token),
                "logprob": entry.logprob,
                "top": [{"token": t, "text": _token_text(model, t), "logprob": p} for t, p in entry.top],
            }
            for entry in completion.logprobs
        ]
    return {
        "model": str(model.path),
        "device": _devices(model, completion),
        "text": completion.text,
        "reasoning": completion.reasoning,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "logprobs": logprobs,
        "timings": {
            "prompt_tokens": timings.prompt_tokens,
            "cached_tokens": timings.cached_tokens,
            "generated_tokens": len(completion.tokens),
            "reasoning_tokens": completion.reasoning_tokens,
            "drafted_tokens": timings.drafted_tokens,
            "accepted_tokens": timings.accepted_tokens,
            "first_token_s": timings.first_token,
            "total_s": timings.total,
            "prefill_tokens_per_second": timings.prefill_tokens_per_second,
            "decode_tokens_per_second": timings.decode_tokens_per_second,
        },
    }


def _print_logprobs(model: Model, completion: Completion) -> None:
    for entry in completion.logprobs or ():
        parts = [(entry.token, entry.logprob), *entry.top]
        texts = [f"{_token_text(model, t)!r} {p:.4f}".replace(r"\\", "\\") for t, p in parts]
        note(f"{texts[0]:<24} {'  '.join(texts[1:])}".rstrip())


def summary(model: Model, completion: Completion) -> str:
    """The timings, in one line."""
    timings = completion.timings
    parts = [f"prompt {_rate(timings.prompt_tokens, timings.prefill_tokens_per_second)}"]
    if timings.cached_tokens:
        parts[0] += f", {timings.cached_tokens} of them from the cache"
    if timings.first_token is not None:
        parts.append(f"first token {seconds(timings.first_token)}")
    parts.append(f"answer {_rate(len(completion.tokens), timings.decode_tokens_per_second)}")
    if timings.drafted_tokens:
        parts[-1] += f", {timings.accepted_tokens} of {timings.drafted_tokens} looked up"
    if completion.reasoning_tokens:
        parts[-1] += f", {completion.reasoning_tokens} of them thinking"
    if completion.finish_reason != "stop":
        ends = {"length": "ended by --max-tokens", "context": "ended by the full context", "cancelled": "interrupted"}
        parts.append(ends[completion.finish_reason])
    return f"[{_devices(model, completion)}: {' · '.join(parts)}]"


def _devices(model: Model, completion: Completion) -> str:
    """The devices that computed an answer: one, or more if a device failed meanwhile."""
    return ", ".join(completion.devices or (model.device.name,))


def _rate(tokens: int, per_second: float | None) -> str:
    text = f"{tokens} token{'' if tokens == 1 else 's'}"
    return text if per_second is None else f"{text} at {per_second:.1f}/s"


def _token_text(model: Model, token: int) -> str:
    """A token's text; bytes that form only part of a character are shown as numbers."""
    return model.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")
