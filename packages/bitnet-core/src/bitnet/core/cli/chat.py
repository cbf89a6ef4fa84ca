"""``bitnet chat``: a conversation at the terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

from bitnet.core.cli.chat_commands import LEAVING, Commands
from bitnet.core.cli.console import note
from bitnet.core.cli.conversation import Conversation
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
from bitnet.core.cli.run import expect_template


@click.command()
@system_option
@model_options
@context_option
@sampling_options
@thinking_options
@click.option("--no-stats", is_flag=True, help="Print no line of statistics after an answer.")
@click.option("--no-markdown", is_flag=True, help="Show Markdown as the model writes it.")
@click.option("--no-history", is_flag=True, help="Neither load nor save the lines typed in conversations.")
def chat(
    system: str | None, no_history: bool, no_markdown: bool, no_stats: bool, hide_thinking: bool, **params: Any
) -> None:
    """Chat with a model; type /help for the commands.

    Where the library rich is installed (pip install "bitnet-core[rich]"), a terminal shows Markdown formatted: each
    paragraph, list, table or piece of code once it is complete.

    A model that thinks first has its thoughts shown dimmed on a terminal.

    When the context is full, the oldest exchanges are forgotten, and a note says so.

    Lines typed at a terminal are saved in the file chat_history of the cache folder, which only you can read, so that
    the arrow keys recall them in later conversations. --no-history saves nothing, and 'bitnet cache clear' removes the
    file.
    """
    expect_template()  # before the imports of the next line
    options = sampling(params)
    conversation = Conversation(
        load(params, max_seqs=1),
        system,
        options,
        thoughts=not hide_thinking,
        statistics=not no_stats,
        formatted=not no_markdown,
    )
    with conversation, prompt(keep=not no_history) as messages:
        commands = Commands(conversation, params)
        if sys.stdin.isatty():
            model = conversation.model
            note(f"{model.config.name} on {model.device.name}; /help for help.")
        while (line := messages.ask()) is not None:
            command = line.strip()
            if command in LEAVING:
                break
            if command in MULTILINE:
                if text := messages.ask_until(MULTILINE[-1]):
                    conversation.say(text)
            elif command and not commands.run(line):
                conversation.say(line)


MULTILINE = ("/multiline", '"""')
"""Lines that begin a message of several lines; the last of them ends it."""
