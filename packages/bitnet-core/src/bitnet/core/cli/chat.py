"""``bitnet chat``: a conversation at the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import Shown, note, say
from bitnet.core.cli.options import (
    context_option,
    load,
    model_options,
    sampling,
    sampling_options,
    system_option,
    thinking_options,
)
from bitnet.core.cli.prompt import prompt
from bitnet.core.cli.run import expect_template, summary
from bitnet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from bitnet.core.api import Model

HELP = """\
/help     this text
/reset    begin a new conversation
/exit     leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one; pasted lines are one message."""


@click.command()
@system_option
@model_options
@context_option
@sampling_options
@thinking_options
@click.option("--no-history", is_flag=True, help="Neither load nor save the lines typed in conversations.")
def chat(system: str | None, no_history: bool, hide_thinking: bool, **params: Any) -> None:
    """Chat with a model; type /help for the commands.

    A model that thinks first has its thoughts shown dimmed on a terminal.

    When the context is full, the oldest exchanges are forgotten, and a note says so.

    Lines typed at a terminal are saved in the file chat_history of the cache folder, which only you can read, so that
    the arrow keys recall them in later conversations. --no-history saves nothing, and 'bitnet cache clear' removes the
    file.
    """
    options = sampling(params)
    expect_template()
    with load(params, max_seqs=1) as model:
        if model.chat_template is None:
            raise InvalidInputError(f"{model.config.name} has no chat template.", hint="Use 'bitnet run --raw'.")
        conversation = Conversation(model, system, options, thoughts=not hide_thinking)
        with prompt(keep=not no_history) as messages:
            if sys.stdin.isatty():
                note(f"{model.config.name} on {model.device.name}; /help for help.")
            while (line := messages.ask()) is not None:
                command = line.strip()
                if command == "/exit":
                    break
                if command == "/help":
                    note(*HELP.splitlines())
                elif command == "/reset":
                    conversation.reset()
                elif command.startswith("/") and len(command.split()) == 1:
                    note(f"unknown command {command}; /help lists the commands.")
                elif line.strip():
                    conversation.say(line)


Exchange = list[dict[str, str]]
"""A message and its answer."""


class Conversation:
    """The exchanges so far, shortened to leave a quarter of the context for the next answer."""

    def __init__(self, model: Model, system: str | None, options: Any, *, thoughts: bool = True) -> None:
        self._model, self._options, self._thoughts = model, options, thoughts
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._exchanges: list[Exchange] = []

    def reset(self) -> None:
        self._exchanges.clear()

    def say(self, text: str) -> None:
        """Print the answer to a message. An interrupt ends the answer; the part printed so far is kept."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # surrogates that stand for undecodable bytes
            note(f"the message is not UTF-8 (at byte {len(text[: error.start].encode())}).")
            return
        exchanges = [*self._exchanges, [{"role": "user", "content": text}]]
        try:
            while (
                len(exchanges) > 1
                and len(self._model.chat_tokens(self._messages(exchanges))) > self._model.context * 3 // 4
            ):
                del exchanges[0]
            stream = self._model.chat_stream(self._messages(exchanges), **self._options)
        except InvalidInputError as error:  # it is too long
            note(str(error))
            return
        if forgotten := len(self._exchanges) + 1 - len(exchanges):
            what = "your first message is" if forgotten == 1 else f"your first {forgotten} messages are"
            note(f"[the context is full: {what} forgotten]")
        self._exchanges = exchanges
        shown = Shown(thoughts=self._thoughts)
        with stream, shown:
            try:
                for chunk in stream:
                    shown.chunk(chunk.reasoning, chunk.text)
            except KeyboardInterrupt:
                stream.close()
        say("")
        completion = stream.result()
        said = {"role": "assistant", "content": completion.text}
        if completion.reasoning:  # the template drops or keeps it
            said["reasoning_content"] = completion.reasoning
        self._exchanges[-1].append(said)
        note(summary(self._model, completion))

    def _messages(self, exchanges: list[Exchange]) -> list[dict[str, str]]:
        return [*self._system, *(message for exchange in exchanges for message in exchange)]
