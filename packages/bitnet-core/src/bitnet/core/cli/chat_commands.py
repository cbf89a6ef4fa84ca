"""The commands that are typed in a chat, such as ``/save``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli import chat_file
from bitnet.core.cli.console import note
from bitnet.core.cli.options import ModelName, load, sampling
from bitnet.core.errors import BitNetError, InvalidInputError

if TYPE_CHECKING:
    from bitnet.core.cli.conversation import Conversation

HELP = '''\
/help           this text
/reset          begin a new conversation; /clear is the same
/undo           take back your last message and its answer
/again          answer your last message anew
/system [TEXT]  show or change the system message; /system "" removes it
/set [NAME [VALUE]]  show or change how answers are sampled: /set temperature 0.7
/model [NAME]   show or change the model: a file or hf:ORG/NAME; the conversation goes on
/save FILE      write the conversation to a JSON file
/load FILE      go on with a conversation that was saved
/multiline      begin a message of several lines; a line """ ends it, and begins one, too
/exit           leave, as exit, quit, /bye and Ctrl-D do
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one; pasted lines are one message.'''

LEAVING = frozenset({"exit", "quit", "/exit", "/quit", "/bye"})
SAMPLED = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "reasoning_budget",
)
"""Parameters of the command line that ``/set`` changes."""


class Commands:
    """Carries out commands on a conversation; what is wrong with one is said, and the chat goes on.

    Args:
        params: The command line's parameters, as for :func:`~bitnet.core.cli.options.load`.
    """

    def __init__(self, conversation: Conversation, params: dict[str, Any]) -> None:
        self._conversation = conversation
        self._params = params
        self._context = click.get_current_context()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(*HELP.splitlines()),
            "/reset": lambda _: conversation.reset(),
            "/clear": lambda _: conversation.reset(),
            "/undo": lambda _: conversation.undo(),
            "/again": lambda _: conversation.again(),
            "/system": self._system,
            "/set": self._set,
            "/model": self._model,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self, line: str) -> bool:
        """Carry out a command; false if the line is a message. One word that begins with ``/`` is always a command."""
        name, _, rest = line.strip().partition(" ")
        if "\n" in line or not name.startswith("/"):
            return False
        command = self._commands.get(name)
        if command is None:
            if rest:
                return False
            note(f"unknown command {name}; /help lists the commands.")
            return True
        try:
            command(rest.strip())
        except BitNetError as error:
            note(error.message if error.hint is None else f"{error.message} {error.hint}")
        except click.UsageError as error:
            note(error.format_message())
        return True

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text in ('""', "''") else _utf8(text)
        elif self._conversation.system is None:
            note("there is no system message.")
        else:
            note(*self._conversation.system.splitlines())

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        options = {
            spelling.lstrip("-").replace("-", "_"): option
            for option in self._context.command.params
            if option.name in SAMPLED
            for spelling in option.opts
        }
        if not name:
            note(*(f"{name} {self._shown(name)}" for name in SAMPLED))
            return
        option = options.get(name.replace("-", "_"))
        if option is None or option.name is None:
            raise InvalidInputError(f"there is nothing named {name} to set.", hint=f"Names: {', '.join(SAMPLED)}.")
        if value := _utf8(value.strip()):
            given = option.process_value(self._context, (value,) if option.multiple else value)
            changed = self._params | {option.name: given}
            self._conversation.options = sampling(changed)
            self._params = changed
        note(f"{option.name} {self._shown(option.name)}")

    def _shown(self, name: str) -> str:
        value = self._params[name]
        if value is None:
            value = -1
        return ", ".join(value) or "none" if isinstance(value, tuple) else str(value)

    def _model(self, name: str) -> None:
        if not name:
            model = self._conversation.model
            note(f"{model.config.name} on {model.device.name}: {model.path}")
            return
        changed = self._params | {"model": ModelName().convert(_file_name(name), None, self._context)}
        model = load(changed, max_seqs=1)
        try:
            self._conversation.change_model(model)
        except BaseException:
            model.close()
            raise
        self._params = changed
        note(f"{model.config.name} on {model.device.name}.")

    def _save(self, name: str) -> None:
        messages = self._conversation.messages()
        if not messages:
            raise InvalidInputError("there is no conversation to save yet.")
        path = _path("/save", name)
        chat_file.save(path, messages)
        note(f"saved: {path}")

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        messages = chat_file.load(path)
        note(f"{path}: {len(messages)} message{'' if len(messages) == 1 else 's'}")
        self._conversation.resume(messages)


def _path(command: str, name: str) -> Path:
    if not name:
        raise InvalidInputError(f"{command} needs the name of a file: {command} chat.json")
    return Path(_file_name(name))


def _file_name(name: str) -> str:
    """A name without the quotes around it, and with the user's folder for ``~``."""
    if name[0] in "'\"":
        try:
            name = " ".join(shlex.split(name))
        except ValueError as error:
            raise InvalidInputError(f"{name}: {error}.") from None
    try:
        return str(Path(_utf8(name)).expanduser())
    except RuntimeError as error:  # no such user
        raise InvalidInputError(f"{name}: {error}") from None


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # surrogates that stand for undecodable bytes
        raise InvalidInputError(f"the text is not UTF-8 (at character {error.start}).") from None
    return text
