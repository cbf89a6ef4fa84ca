"""Tools that a model may call: parsed from a request, described to the model, and enforced if the request says so.

A chat template of a known family receives the tools, and calls are parsed in the family's format. For other templates,
a system message lists the tools and says how to call them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import brief
from bitnet.server.chat.call_forms import Tool, call_grammar, call_parser, lazy_form
from bitnet.server.chat.tool_calls import CallParser
from bitnet.server.forms.lazy import LazyForm
from bitnet.server.forms.structured import Form, available
from bitnet.server.request.bounded_json import parse_text
from bitnet.server.request.errors import unsupported, wrong
from bitnet.server.request.fields import Fields

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate

MAX_TOOLS = 128
MAX_NAME = 128
CHOICES = ("none", "auto", "required", "any")
"""Words of ``tool_choice``; ``any`` is another name of ``required``."""

KNOWN_FORMS, KNOWN_LENGTH = 32, 100_000
"""Number of forms of calls that are kept, and the characters of the tools' schemas up to which they are."""

INPUT = "input"
"""The argument by which the model writes the text for a custom tool."""


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
        return call_parser(template, self.names, parallel=self.parallel, prefix=prefix, required=self.required)

    def parsed(self, text: str, template: ChatTemplate | None, prefix: str = "call_") -> CallParser:
        """A parser that has processed a whole answer."""
        parser = self.parser(template, prefix)
        parser.push(text)
        parser.end()
        return parser

    def form(self, template: ChatTemplate | None, answer: Form | None = None) -> Form | None:
        """The form that the answer, or each call in it, must have; None: any.

        Args:
            answer: The form of an answer without calls, a JSON schema; None: any.

        Raises:
            RequestError: The answer must have a form, but ``llguidance`` is not installed.
        """
        allowed = [tool for tool in self.known if tool.name in self.names]
        strict = [tool for tool in allowed if tool.strict]
        if not self.required and not strict and answer is None:
            lazy = partial(_lazy_form, allowed, template, self.parallel)
            return ("lazy", lazy, "tools") if available() else None
        if not available():
            field = f"{strict[0].field}.strict" if strict and not self.required else "tool_choice"
            raise unsupported(field, 'the server lacks llguidance (pip install "bitnet-server[structured]").')
        make = partial(call_grammar, allowed, template, answer, required=self.required, parallel=self.parallel)
        return "tools", make, "tools"


def _lazy_form(tools: Sequence[Tool], template: ChatTemplate | None, parallel: bool) -> LazyForm:
    """As :func:`~bitnet.server.chat.call_forms.lazy_form`; agents send the same tools with every request."""
    try:
        written = json.dumps([(tool.name, tool.parameters) for tool in tools])
    except RecursionError:
        return lazy_form(tools, template, parallel=parallel)
    if len(written) > KNOWN_LENGTH:
        return lazy_form(tools, template, parallel=parallel)
    return _known_form(written, template, parallel)


@lru_cache(maxsize=KNOWN_FORMS)
def _known_form(written: str, template: ChatTemplate | None, parallel: bool) -> LazyForm:
    tools = [Tool(name, "", parameters, False, "") for name, parameters in json.loads(written)]
    return lazy_form(tools, template, parallel=parallel)


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
