"""A conversation with a model at the terminal: its exchanges, which of them the model still sees, and its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitnet.core.cli.console import Shown, note, say
from bitnet.core.cli.run import summary
from bitnet.core.errors import InvalidInputError
from bitnet.core.support.foreign import label

if TYPE_CHECKING:
    from bitnet.core.api import Model

Exchange = list[dict[str, str]]
"""A message and its answer."""


class Conversation:
    """The exchanges so far. The model is given the last of them, and a quarter of its context is left for the answer.

    Args:
        model: Closed at the end of this context.
        options: Arguments of :meth:`~bitnet.core.api.Model.chat_stream`.
        thoughts: Show what the model thinks before it answers.
        statistics: Print a line of them after each answer.
        formatted: Show Markdown formatted where that is possible.

    Raises:
        InvalidInputError: The model has no chat template.
    """

    def __init__(
        self,
        model: Model,
        system: str | None,
        options: Any,
        *,
        thoughts: bool = True,
        statistics: bool = True,
        formatted: bool = True,
    ) -> None:
        self.system, self.options = system, options
        self._thoughts, self._statistics, self._formatted = thoughts, statistics, formatted
        self._exchanges: list[Exchange] = []
        self._forgotten = 0
        try:
            _check_template(model)
        except BaseException:
            model.close()
            raise
        self.model = model

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *error: object) -> None:
        self.model.close()

    def change_model(self, model: Model) -> None:
        """Go on with another model, and close the one so far.

        Raises:
            InvalidInputError: The other model has no chat template; nothing has changed.
        """
        _check_template(model)
        self.model.close()
        self.model, self._forgotten = model, 0

    def reset(self) -> None:
        self._exchanges, self._forgotten = [], 0

    def undo(self) -> None:
        """Take back the last exchange."""
        if not self._exchanges:
            raise InvalidInputError("there is no message to take back.")
        text = self._exchanges.pop()[0]["content"]
        self._forgotten = min(self._forgotten, max(len(self._exchanges) - 1, 0))
        note(f"taken back: {label(text)}")

    def again(self) -> None:
        """Answer the last message anew; if that fails, its answer so far is kept."""
        if not self._exchanges:
            raise InvalidInputError("there is no message to answer again.")
        last = self._exchanges.pop()
        if not self.say(last[0]["content"]):
            self._exchanges.append(last)

    def messages(self) -> list[dict[str, str]]:
        """The whole conversation; the system message is not one by itself."""
        return self._messages(self._exchanges) if self._exchanges else []

    def resume(self, messages: list[dict[str, str]]) -> None:
        """Go on with messages in place of those so far: a system message, if any, then the user's and the assistant's
        in turns. A last message without an answer is answered."""
        turns = messages[1:] if messages[0]["role"] == "system" else messages
        self.system = messages[0]["content"] if turns is not messages else None
        self._exchanges, self._forgotten = [turns[i : i + 2] for i in range(0, len(turns), 2)], 0
        if self._exchanges and len(self._exchanges[-1]) == 1:
            self.say(self._exchanges.pop()[0]["content"])

    def say(self, text: str) -> bool:
        """Print the answer to a message. An interrupt ends the answer; the part printed so far is kept.

        Returns:
            Whether the message was taken; otherwise a note says why not, and nothing has changed.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # surrogates that stand for undecodable bytes
            note(f"the message is not UTF-8 (at byte {len(text[: error.start].encode())}).")
            return False
        exchanges = [*self._exchanges, [{"role": "user", "content": text}]]
        first = self._forgotten
        try:
            while (
                len(exchanges) - first > 1
                and len(self.model.chat_tokens(self._messages(exchanges[first:]))) > self.model.context * 3 // 4
            ):
                first += 1
            stream = self.model.chat_stream(self._messages(exchanges[first:]), **self.options)
        except InvalidInputError as error:  # it is too long
            note(str(error))
            return False
        if first > self._forgotten:
            what = "your first message is" if first == 1 else f"your first {first} messages are"
            note(f"[the context is full: {what} forgotten]")
        self._exchanges, self._forgotten = exchanges, first
        shown = Shown(thoughts=self._thoughts, formatted=self._formatted)
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
        if self._statistics:
            note(summary(self.model, completion))
        return True

    def _messages(self, exchanges: list[Exchange]) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *(message for exchange in exchanges for message in exchange)]


def _check_template(model: Model) -> None:
    if model.chat_template is None:
        raise InvalidInputError(f"{model.config.name} has no chat template.", hint="Use 'bitnet run --raw'.")
