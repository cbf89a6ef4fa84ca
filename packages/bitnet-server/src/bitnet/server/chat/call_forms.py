"""The grammars that hold tool calls to the format of a model's family, and their arguments to the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bitnet.server.chat.tool_calls import CLOSE, OPEN, PYTHON_TAG
from bitnet.server.forms.json_rules import TERMINALS, JsonRules, literal, spelled
from bitnet.server.forms.lazy import LazyForm
from bitnet.server.forms.schema import SchemaError, bounded, prepared
from bitnet.server.forms.structured import ANY_OBJECT, Form
from bitnet.server.request.errors import wrong

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate

Family = Literal["tagged", "llama", "generic"]
"""``tagged``: the format of Hermes and Qwen; ``generic``: the format requested from models with other templates."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: Whether a call's arguments must fit the schema.
        field: Its path in the body.
        custom: Whether it takes a text, which the model writes as the argument ``input``.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool
    field: str
    custom: bool = False

    def described(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def family(template: ChatTemplate | None) -> Family:
    """The format in which a model writes calls, derived from its template."""
    source = "" if template is None else template.source
    if "tools" not in source:
        return "generic"
    if OPEN in source:
        return "tagged"
    return "llama" if PYTHON_TAG in source else "generic"


def call_grammar(
    tools: Sequence[Tool],
    template: ChatTemplate | None,
    answer: Form | None = None,
    *,
    required: bool,
    parallel: bool,
) -> str:
    """A Lark grammar of whole answers; without ``required``, the answer's form or text is allowed in place of calls.

    Raises:
        RequestError: A schema cannot be enforced.
    """
    kind = family(template)
    tagged, key = kind == "tagged", "parameters" if kind == "llama" else "arguments"
    held = [tool.parameters if required or tool.strict else ANY_OBJECT for tool in tools]
    rules = ["%llguidance {}"]
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    if required or not tagged or answer is not None:
        more = ('("; " call)*' if kind == "llama" else '("\\n" call)*') if parallel else ""
        other = "" if required else " | FREE" if answer is None else " | answer"
        rules.append(f"start: call {more}{other}")
        rules.append(f"call: {calls}")
        if answer is not None:
            rules.append(f"answer: %json {json.dumps(_compact(answer[1], answer[2]))}")
        elif not required:
            rules.append(r"FREE: /\s*([^\s{\[<](.|\n)*)?/")
    else:
        rules.append(f"start: ({calls}){'*' if parallel else '?'} TEXT")
        rules.append(r"TEXT: /(.|\n)*/")
    for i, (tool, schema) in enumerate(zip(tools, held, strict=True)):
        rules.append(f"arguments_{i}: %json {json.dumps(_compact(schema, tool.field))}")
        if answer is not None and not tagged:
            # Lexemes are matched greedily: a longer one would rule out an answer that begins with the same ones.
            pieces = ["{", '"name"', ":", json.dumps(tool.name), ",", f'"{key}"', ":"]
            rules.append(f'call_{i}: {" ".join(map(json.dumps, pieces))} arguments_{i} "}}"')
            continue
        begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        opening, begin = (OPEN, "\n" + begin) if tagged else ("", begin)
        ending = "}\n" + CLOSE if tagged else "}"
        if tagged and not required and answer is None:
            rules.append(f"open_{i}[lazy]: TEXT {json.dumps(opening)}")
            opening = f"open_{i}"
        else:
            begin, opening = opening + begin, ""
        rules.append(f"call_{i}: {opening} {json.dumps(begin)} arguments_{i} {json.dumps(ending)}")
    return "\n".join(rules)


def _compact(schema: Any, field: str) -> Any:
    """A schema as it is compiled, for JSON with at most one space between its parts, as models write calls.

    Raises:
        RequestError: It exceeds a limit, or cannot be enforced; the error names the field.
    """
    try:
        bounded(schema)
        found = prepared(schema)
    except SchemaError as error:
        raise wrong(field, str(error)) from None
    return {**found, "x-guidance": {"whitespace_pattern": " "}} if isinstance(found, dict) else found


def lazy_form(tools: Sequence[Tool], template: ChatTemplate | None, *, parallel: bool) -> LazyForm:
    """The form of calls in answers that may hold some; its second grammar takes any objects as arguments."""
    tagged = family(template) == "tagged"
    schemas = [_schema(tool) for tool in tools]
    grammars = [_lazy_grammar(tools, made, tagged, parallel) for made in (schemas, [ANY_OBJECT] * len(tools))]
    names = "|".join(re.escape(json.dumps(tool.name)) for tool in tools)
    return LazyForm(OPEN if tagged else "", f"{HEAD}({names})", tuple(dict.fromkeys(grammars)))


HEAD = r'\s*(<\|python_tag\|>\s*)?(\[\s*)?\{\s*("(type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*'
"""How a call without tags begins, up to the tool's name."""


def _lazy_grammar(tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]], tagged: bool, parallel: bool) -> str:
    """One tagged call from its tag on, as another one begins with a tag of its own; or an answer of calls only, in a
    list or one after another."""
    made = JsonRules()
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules = ["%llguidance {}"]
    if tagged:
        rules += [f"start: open WS? call WS? {literal(CLOSE)} | OTHER", f"open[lazy]: TEXT {literal(OPEN)}"]
        rules += [r"TEXT: /(.|\n)*/", rf"OTHER: /(.|\n)*/ & ~/(.|\n)*{re.escape(OPEN)}(.|\n)*/"]
    else:
        more = "(SEPARATOR (tag WS?)? call)*" if parallel else ""
        rules += [f'start: WS? (tag WS?)? ("[" WS?)? call {more} WS? ("]" WS?)?', f"tag: {literal(PYTHON_TAG)}"]
        rules.append('about: ("\\"type\\"" | "\\"id\\"") WS? ":" WS? ID WS? "," WS?')
        rules.append(r'ID: /"[^"\\\x00-\x1F]{0,40}"/')
        rules += [r"SEPARATOR: /[ \t\r\n]{0,16}[;,\n][ \t\r\n]{0,16}/"]
    rules.append(f"call: {calls}")
    rules.append('key: ("\\"arguments\\"" | "\\"parameters\\"") WS? ":" WS?')
    about = "" if tagged else "about? about?"
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        name = f'"\\"name\\"" WS? ":" WS? {spelled(tool.name)} WS? "," WS?'
        rules.append(f'call_{i}: "{{" WS? {about} {name} key {made.arguments(schema)} WS? "}}"')
    return "\n".join([*rules, *made.rules, TERMINALS])


def _schema(tool: Tool) -> Mapping[str, Any]:
    """A tool's schema; any object where it exceeds a limit."""
    try:
        bounded(tool.parameters)
    except SchemaError:
        return ANY_OBJECT
    return tool.parameters
