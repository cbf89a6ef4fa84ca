"""Chat templates: Jinja2 with the conventions of Hugging Face's ``apply_chat_template``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NoReturn

from jinja2 import TemplateError

from bitnet.core.errors import InvalidInputError
from bitnet.core.sandbox import BoundedEnvironment


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: Jinja2 source, as in ``tokenizer.chat_template``. It comes from a model file and is not trusted: it runs
            in a sandbox, with bounds on its loops and on what it makes.
        bos_token: Text of the begin token.
        eos_token: Text of the end token.

    Raises:
        InvalidInputError: The source is no template.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = Lock()  # the environment counts what one rendering does
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._environment = BoundedEnvironment(source, {"tojson": _tojson}, functions)
        except Exception as error:  # hostile source can make the parser fail in any way
            raise InvalidInputError(f"the chat template cannot be read: {_reason(error)}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation.

        Args:
            messages: Each with ``role`` (``system``, ``user``, ``assistant``) and ``content``.
            add_generation_prompt: End with what begins the assistant's answer.

        Raises:
            InvalidInputError: The template refuses the messages, fails, or exceeds its bounds.
        """
        with self._lock:
            self._environment.reset()
            try:
                return self._environment.template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens
                )
            except Exception as error:  # a template can fail in any way Python code can
                raise InvalidInputError(f"the chat template fails: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:200].rstrip(".")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escaping for HTML that Jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
