"""Tools that a model may call: parsed from a request, described to the model, and enforced if the request says so.

A chat template of a known family receives the tools, and calls are parsed in the family's format. For other templates,
a system message lists the tools and says how to call them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from bitnet.core.errors import brief
from bitnet.server.chat.tool_calls import CLOSE, OPEN, PYTHON_TAG, CallParser
from bitnet.server.forms.schema import SchemaError, bounded, prepared
from bitnet.server.forms.structured import ANY_OBJECT, Form, available
from bitnet.server.request.bounded_json import parse_text
from bitnet.server.request.errors import unsupported, wrong
from bitnet.server.request.fields import Fields

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate

MAX_TOOLS = 128
MAX_NAME = 128
CHOICES = ("none", "auto", "required", "any")
"""Words of ``tool_choice``; ``any`` is another name of ``required``."""

INPUT = "input"
"""The argument by which the model writes the text for a custom tool."""

Family = Literal["tagged", "llama", "generic"]
"""``tagged``: the format of Hermes and Qwen; ``generic``: the format requested from models with other templates."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: Whether a call's arguments must fit the schema.
        field: Its path in the body.
        custom: Whether it takes a text, which the model writes as the argument :data:`INPUT`.
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


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        known: All tools, which are described to the model.
        names: Names of the tools that may be called.
        required: Whether one must be called.
        parallel: Whether more than one may be called in an answer.
    """

    known: tuple[Tool, ...]
    names: frozenset[str]
    required: bool = False
    parallel: bool = True

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools that take a text."""
        return frozenset(tool.name for tool in self.known if tool.custom)

    def parser(self, template: ChatTemplate | None, prefix: str = "call_") -> CallParser:
        """A parser for one answer."""
        tagged, parallel = family(template) == "tagged", self.parallel
        return CallParser(self.names, tagged=tagged, parallel=parallel, prefix=prefix, required=self.required)

    def parsed(self, text: str, template: ChatTemplate | None, prefix: str = "call_") -> CallParser:
        """A parser that has processed a whole answer."""
        parser = self.parser(template, prefix)
        parser.push(text)
        parser.end()
        return parser

    def form(self, template: ChatTemplate | None, answer: Form | None = None) -> Form | None:
        """The form that the answer must have; None: any.

        Args:
            answer: The form of an answer without calls, a JSON schema; None: any.

        Raises:
            RequestError: The answer must have a form, but ``llguidance`` is not installed.
        """
        allowed = [tool for tool in self.known if tool.name in self.names]
        strict = [tool for tool in allowed if tool.strict]
        if not self.required and not strict and answer is None:
            return None
        if not available():
            field = f"{strict[0].field}.strict" if strict and not self.required else "tool_choice"
            raise unsupported(field, 'the server lacks llguidance (pip install "bitnet-server[structured]").')
        return "tools", lambda: self._grammar(allowed, template, answer), "tools"

    def _grammar(self, allowed: Sequence[Tool], template: ChatTemplate | None, answer: Form | None) -> str:
        """A Lark grammar of the answers; without ``required``, the answer's form or text is allowed in place of
        calls."""
        kind = family(template)
        tagged, key = kind == "tagged", "parameters" if kind == "llama" else "arguments"
        held = [tool.parameters if self.required or tool.strict else ANY_OBJECT for tool in allowed]
        rules = ["%llguidance {}"]
        calls = " | ".join(f"call_{i}" for i in range(len(allowed)))
        if self.required or not tagged or answer is not None:
            more = ('("; " call)*' if kind == "llama" else '("\\n" call)*') if self.parallel else ""
            other = "" if self.required else " | FREE" if answer is None else " | answer"
            rules.append(f"start: call {more}{other}")
            rules.append(f"call: {calls}")
            if answer is not None:
                rules.append(f"answer: %json {json.dumps(_compact(answer[1], answer[2]))}")
            elif not self.required:
                rules.append(r"FREE: /\s*([^\s{\[<](.|\n)*)?/")
        else:
            rules.append(f"start: ({calls}){'*' if self.parallel else '?'} TEXT")
            rules.append(r"TEXT: /(.|\n)*/")
        for i, (tool, schema) in enumerate(zip(allowed, held, strict=True)):
            rules.append(f"arguments_{i}: %json {json.dumps(_compact(schema, tool.field))}")
            if answer is not None and not tagged:
                # Lexemes are matched greedily: a longer one would rule out an answer that begins with the same ones.
                pieces = ["{", '"name"', ":", json.dumps(tool.name), ",", f'"{key}"', ":"]
                rules.append(f'call_{i}: {" ".join(map(json.dumps, pieces))} arguments_{i} "}}"')
                continue
            begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
            opening, begin = (OPEN, "\n" + begin) if tagged else ("", begin)
            ending = "}\n" + CLOSE if tagged else "}"
            if tagged and not self.required and answer is None:
                rules.append(f"open_{i}[lazy]: TEXT {json.dumps(opening)}")
                opening = f"open_{i}"
            else:
                begin, opening = opening + begin, ""
            rules.append(f"call_{i}: {opening} {json.dumps(begin)} arguments_{i} {json.dumps(ending)}")
        return "\n".join(rules)


def _compact(schema: Any, field: str) -> Any:
    """A schema as it is compiled, for JSON without spaces.

    Raises:
        RequestError: It exceeds a limit, or cannot be enforced; the error names the field.
    """
    try:
        bounded(schema)
        found = prepared(schema)
    except SchemaError as error:
        raise wrong(field, str(error)) from None
    return {**found, "x-guidance": {"whitespace_flexible": False}} if isinstance(found, dict) else found


def family(template: ChatTemplate | None) -> Family:
    """The format in which a model writes calls, derived from its template."""
    source = "" if template is None else template.source
    if "tools" not in source:
        return "generic"
    if OPEN in source:
        return "tagged"
    return "llama" if PYTHON_TAG in source else "generic"


def function_call(fields: Fields, id: str | None, arguments: str = "arguments") -> dict[str, Any]:
    """A call in a conversation. Its arguments are an object, or text if they are not one: a call that was cut off, or
    that the model wrote wrongly, is part of the conversation, too.

    Raises:
        RequestError: The name is missing.
    """
    fields.require("name")
    value = fields.values.get(arguments)
    if isinstance(value, str):
        with suppress(ValueError):
            value = parse_text(value or "{}")
    if value is not None and not isinstance(value, dict):
        given = fields.values[arguments]
        value = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return made_call(id or "", fields.text("name") or "", value or {})


def made_call(id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """A call as conversations hold it. Arguments that are text are no JSON object; see
    :func:`~bitnet.server.chat.rendering.as_template_reads`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def openai_tools(fields: Fields, *, nested: bool = True) -> Tools | None:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls`` of OpenAI's and Ollama's APIs; None: none may be called.

    Args:
        nested: Whether a function is under the key ``function``, as in chats, or in the tool itself, as in responses.

    Raises:
        RequestError: A tool or the choice is invalid, or of a kind that this server does not support.
    """
    known = []
    for given in fields.objects("tools", MAX_TOOLS) or ():
        if (kind := given.text("type", "function")) != "function":
            if nested:
                raise unsupported(given.name("type"), f"{brief(kind)} is not supported; only functions are.")
            if kind == "custom":
                known.append(_custom_tool(given))
            continue  # see other_tools
        if nested:
            given.require("function")
        function = (given.object("function") if nested else None) or given
        known.append(read_tool(function, "parameters"))
    tools = _all_of(known, fields)
    parallel = fields.flag("parallel_tool_calls", True)
    if isinstance(fields.values.get("tool_choice"), dict):
        return _described(tools, fields.object("tool_choice") or fields, nested, parallel)
    return chosen(tools, fields.choice("tool_choice", CHOICES, "auto"), "tool_choice", parallel=parallel)


def read_tool(function: Fields, parameters: str) -> Tool:
    """A tool with ``name``, ``description``, ``strict`` and the schema in ``parameters``."""
    function.require("name")
    name = function.text("name") or ""
    if len(name) > MAX_NAME or not all(c.isalnum() or c in "_-.:/" for c in name):
        raise wrong(
            function.name("name"), f"is {brief(name)}; it must be letters, digits, _ and -, {MAX_NAME} at most."
        )
    schema = function.object(parameters)
    values = {"type": "object", "properties": {}} if schema is None else dict(schema.values)
    if schema is not None and values.setdefault("type", "object") != "object":
        raise wrong(schema.name("type"), f"is {brief(values['type'])}; arguments are an object.")
    return Tool(name, function.text("description") or "", values, function.flag("strict"), function.name(parameters))


def _custom_tool(given: Fields) -> Tool:
    """A tool that takes a text. The grammar of the text, if there is one, is described to the model, not enforced."""
    given.require("name")
    form = given.object("format") or Fields({}, "format")
    grammar = form.text("definition")
    lines = [given.text("description") or "", f"The grammar of the input:\n{grammar}" if grammar else ""]
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    named = {"name": given.values["name"], "description": "\n".join(filter(None, lines)), "parameters": schema}
    return replace(read_tool(Fields(named, given.name("")[:-1]), "parameters"), custom=True)


def _all_of(known: Sequence[Tool], fields: Fields) -> Tools | None:
    names = frozenset(tool.name for tool in known)
    if len(names) < len(known):
        raise wrong(fields.name("tools"), "has two tools with the same name.")
    return Tools(tuple(known), names) if known else None


def chosen(
    tools: Tools | None, choice: str, field: str, *, parallel: bool, names: Sequence[str] | None = None
) -> Tools | None:
    """The tools left by a choice, one of :data:`CHOICES`.

    Args:
        field: What asks for it, for errors.
        names: The only tools that may be called; None: all.

    Raises:
        RequestError: A call to a tool that does not exist is required.
    """
    if choice == "none":
        return None
    if tools is None:
        if choice == "auto" and not names:
            return None
        raise wrong(field, "asks for a call, but there are no tools.")
    if names is not None:
        if (other := next((name for name in names if name not in tools.names), None)) is not None:
            raise wrong(field, f"names {brief(other)}, which is not one of the tools.")
        tools = replace(tools, names=frozenset(names))
    return replace(tools, required=choice != "auto", parallel=parallel)


def _described(tools: Tools | None, choice: Fields, nested: bool, parallel: bool) -> Tools | None:
    """A choice that is an object: a function, several with ``allowed_tools``, or a word as its type."""
    kind = choice.text("type", "function") or ""
    if kind in CHOICES:
        return chosen(tools, kind, choice.name("type"), parallel=parallel)
    if kind == "allowed_tools":
        allowed = (choice.object(kind) if nested else None) or choice
        allowed.require("tools")
        mode = allowed.choice("mode", ("auto", "required"), "auto")
        given = [_name(tool, nested) for tool in allowed.objects("tools", MAX_TOOLS) or ()]
        if not given:
            raise wrong(allowed.name("tools"), "is empty; to forbid calls, set tool_choice to none.")
        return chosen(tools, mode, allowed.name("tools"), parallel=parallel, names=given)
    if kind != "function" and (nested or kind != "custom"):
        raise unsupported(choice.name("type"), f"{brief(kind)} cannot be requested; only a function can.")
    return chosen(tools, "required", choice.name(kind), parallel=False, names=[_name(choice, nested)])


def _name(choice: Fields, nested: bool) -> str:
    """The name of a chosen function."""
    named = (choice.object("function") if nested else None) or choice
    named.require("name")
    return named.text("name") or ""


def anthropic_tools(fields: Fields) -> Tools | None:
    """``tools`` and ``tool_choice`` of Anthropic's API; None: nothing may be called.

    Raises:
        RequestError: As for :func:`openai_tools`.
    """
    known = []
    for given in fields.objects("tools", MAX_TOOLS) or ():
        if given.text("type", "custom") != "custom":
            continue  # see other_tools
        known.append(read_tool(given, "input_schema"))
    tools = _all_of(known, fields)
    choice = fields.object("tool_choice") or Fields({"type": "auto"}, "tool_choice")
    choice.require("type")
    kind = choice.choice("type", ("none", "auto", "any", "tool"), "")
    parallel = not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        choice.require("name")
        return chosen(tools, "required", choice.name("name"), parallel=False, names=[choice.text("name") or ""])
    return chosen(tools, "required" if kind == "any" else kind, choice.name("type"), parallel=parallel)


def other_tools(fields: Fields, *own: str) -> list[str]:
    """Types of the tools that another server would run, such as a web search. The model is not told of them.

    Args:
        own: The types of the client's tools, the usual one first.
    """
    kinds = (tool.text("type", own[0]) for tool in fields.objects("tools", MAX_TOOLS) or ())
    return [brief(kind) for kind in kinds if kind not in own]


def only_form(tools: Tools | None, form: Form | None, template: ChatTemplate | None) -> Form | None:
    """The form that the answer must have: calls, the requested form, or either.

    Raises:
        RequestError: The requested form is no JSON schema, but tools may be called in its place.
    """
    if tools is None:
        return form
    if form is None or tools.required:
        return tools.form(template)
    if form[0] != "json":
        raise wrong(form[2], "and tools cannot both be given; set tool_choice to none, or give a JSON schema.")
    return tools.form(template, form)
