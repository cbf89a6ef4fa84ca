"""What a chat template does with thoughts, found by rendering it: where it opens one, and which variables steer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet.core.text.thinking import Marks, marks_of

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether to think: of Qwen, GLM and SmolLM, and of DeepSeek and Granite."""
EFFORTS = {
    "minimal": ("minimal", "low"),
    "low": ("low",),
    "medium": ("medium",),
    "high": ("high", "xhigh"),
    "xhigh": ("xhigh", "high"),
    "max": ("max", "xhigh", "high"),
}
"""Words of ``reasoning_effort``, and the nearest ones that a template may know, the best first."""

_ASKED = ({"role": "user", "content": "."},)
RenderEach = Callable[[Sequence[Any]], Sequence[str | None]]
"""As :meth:`~bitnet.core.text.chat.ChatTemplate.render_each`."""


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """How a template's thoughts are marked and steered.

    Attributes:
        marks: The texts around a thought.
        variable: The variable that switches thinking on and off; None: there is none.
        efforts: For each word of :data:`EFFORTS` that has an effect, the template's own word.
        opens: Whether the template opens a thought where nothing is said about thinking.
    """

    marks: Marks
    variable: str | None
    efforts: Mapping[str, str]
    opens: bool

    def variables(self, on: bool) -> dict[str, Any]:
        """The variables that switch thinking on or off; empty if the template has none."""
        return {} if self.variable is None else {self.variable: on}

    def opened_by(self, text: str) -> bool:
        """Whether a prompt ends inside a thought that it has just opened."""
        return text.rstrip().endswith(self.marks.start)


def switch_of(source: str, render_each: RenderEach) -> ThinkingSwitch | None:
    """What the template with this source does with thoughts; None: it names no marks.

    Raises:
        InvalidInputError: The template refuses a conversation of one message.
    """
    marks = marks_of(source)
    if marks is None:
        return None
    tried: list[dict[str, Any]] = [{}]
    tried += [{name: value} for name in SWITCHES for value in (True, False)]
    words = tuple(dict.fromkeys(word for choices in EFFORTS.values() for word in choices))
    tried += [{"reasoning_effort": word} for word in words]
    plain, *made = render_each([(_ASKED, None, variables) for variables in tried])
    assert plain is not None
    texts = {next(iter(values.items())): text for values, text in zip(tried[1:], made, strict=True)}
    switch = next((name for name in SWITCHES if _differ(texts[name, True], texts[name, False])), None)
    efforts: dict[str, str] = {}
    if len({texts["reasoning_effort", word] for word in words} | {plain}) > 1:
        for effort, choices in EFFORTS.items():
            known = [word for word in choices if texts["reasoning_effort", word] is not None]
            efforts |= {effort: known[0]} if known else {}
    return ThinkingSwitch(marks, switch, efforts, plain.rstrip().endswith(marks.start))


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other
