"""Prompts of completions: texts, token ids, and both in turn."""

from __future__ import annotations

from dataclasses import dataclass

from bitnet.core.errors import ContextFullError, brief
from bitnet.server.models.service import Service
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields, are_tokens

MAX_PROMPTS = 256
"""Maximum prompts of a request, and texts between token ids."""
_WANTED = "it must be a text, token ids, or a list of them, none empty."


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: texts and token ids, in order."""

    parts: tuple[str | int, ...]

    def tokens(self, service: Service, special: bool, *, parse: bool = True) -> list[int]:
        """Its token ids. This is slow: call it outside the event loop.

        Args:
            special: Whether a text at its beginning gets the begin token.
            parse: Whether special tokens that are spelled out in a text are recognised.
        """
        ids: list[int] = []
        for i, part in enumerate(self.parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += service.text_tokens(part, add_special=special and i == 0, parse_special=parse)
        return ids

    def text(self, service: Service) -> str:
        """Its text.

        Raises:
            ContextFullError: It has more tokens than the context.
            RequestError: A token is not in the vocabulary.
        """
        vocabulary, context = service.model.tokenizer.vocab_size, service.model.context
        ids = [part for part in self.parts if isinstance(part, int)]
        if len(ids) > context:
            raise ContextFullError(f"the prompt has {len(ids):,} tokens; the context holds {context}.")
        if any(not 0 <= token < vocabulary for token in ids):
            raise wrong("prompt", f"has a token that is not in the vocabulary, 0 … {vocabulary - 1}.")
        decode = service.model.tokenizer.decode
        if len(ids) == len(self.parts):
            return decode(ids, skip_special=False)
        return "".join(part if isinstance(part, str) else decode([part], skip_special=False) for part in self.parts)


def read_prompts(fields: Fields, name: str = "prompt", most: int = MAX_PROMPTS) -> list[Prompt]:
    """The prompts of a request: one or several, as OpenAI's and llama.cpp's APIs write them.

    Args:
        name: The field that has them.
        most: Maximum number of prompts.

    Raises:
        RequestError: There is none, or one is empty or of another kind.
    """
    fields.require(name)
    value = fields.values[name]
    several = value if isinstance(value, list) and value and not any(map(_is_token, value)) else [value]
    if len(several) > most:
        raise wrong(fields.name(name), f"has {len(several):,} texts; at most {most} are allowed.")
    return [_prompt(one, fields.name(name)) for one in several]


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt(value: object, name: str) -> Prompt:
    if isinstance(value, dict):  # how llama.cpp's server takes a text beside images
        text = Fields(value, name)
        text.refuse({"multimodal_data": "the model reads and writes text only."})
        text.require("prompt_string")
        value = text.text("prompt_string")
    parts = tuple(value) if isinstance(value, list) else (value,)
    texts = [part for part in parts if isinstance(part, str)]
    others = [part for part in parts if not isinstance(part, str)]
    if not parts or not all(texts) or not are_tokens(others) or (others and not isinstance(value, list)):
        raise wrong(name, f"is {brief(value)}; {_WANTED}")
    if len(texts) > MAX_PROMPTS:
        raise wrong(name, f"has {len(texts):,} texts between token ids; at most {MAX_PROMPTS} are allowed.")
    return Prompt(parts)
