"""The grammars that hold tool calls to the format of a model's family, and their arguments to the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bitnet.server.chat import marked_calls as marks
from bitnet.server.chat.dsml_calls import DsmlCalls
from bitnet.server.chat.tool_calls import CLOSE, OPEN, PYTHON_TAG, CallParser
from bitnet.server.forms.dsml_rules import (
    DSML,
    DSML_TERMINALS,
    INVOKE,
    INVOKED,
    PARAMETER,
    PARAMETER_END,
    WRAPPERS,
    DsmlRules,
)
from bitnet.server.forms.json_rules import PYTHON_TERMINALS, TERMINALS, WHITE, JsonRules, literal, spelled
from bitnet.server.forms.lazy import LazyForm
from bitnet.server.forms.schema import SchemaError, bounded, prepared
from bitnet.server.forms.structured import ANY_OBJECT, Form
from bitnet.server.request.errors import wrong

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate

Family = Literal["tagged", "llama", "mistral", "deepseek", "dsml", "python", "generic"]
"""``tagged``: the format of Hermes and Qwen; ``deepseek`` and ``dsml``: those of DeepSeek's models up to V3.1 and since
V3.2; ``python``: that of MiniCPM; ``generic``: the format requested from models with other templates."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a family writes calls after a mark. Where the model spells them itself, white space may differ.

    Attributes:
        mark: The mark with which calls begin.
        open: What follows it, before the first call.
        before: A call up to its arguments; ``{}`` stands for the tool's name.
        after: A call after its arguments.
        between: What separates calls.
        close: What follows the last one.
        arguments: How arguments are written: as a JSON object; as keywords of Python, with the parenthesis after them;
            or as parameters of DSML, with the tag after them.
    """

    mark: str
    open: str
    before: str
    after: str
    between: str
    close: str
    arguments: Literal["json", "python", "dsml"] = "json"


_MISTRAL_LIST = Spelling(marks.TOOL_CALLS, "[", '{"name": "{}", "arguments": ', "}", ", ", "]")
_MISTRAL = Spelling(marks.TOOL_CALLS, "", "{}" + marks.ARGS, "", marks.TOOL_CALLS, "")
_DEEPSEEK_FENCED = Spelling(
    marks.CALLS_BEGIN,
    "",
    marks.CALL_BEGIN + "function" + marks.CALL_SEP + "{}\n```json\n",
    "\n```" + marks.CALL_END,
    "\n",
    marks.CALLS_END,
)
_DEEPSEEK = Spelling(
    marks.CALLS_BEGIN, "", marks.CALL_BEGIN + "{}" + marks.CALL_SEP, marks.CALL_END, "", marks.CALLS_END
)
_PYTHON = Spelling(marks.PYTHON_OPEN, "\n```python\n", "{}(", "", "\n", "\n```\n" + marks.PYTHON_CLOSE, "python")


_DSML = {
    tag: Spelling(f"<{DSML}{tag}>", "\n", INVOKE + '{}">', "", "\n", f"\n</{DSML}{tag}>", "dsml") for tag in WRAPPERS
}


def _spelling(template: ChatTemplate | None) -> Spelling | None:
    """How calls are spelled in a template's family; None: not after a mark of their own."""
    kind, source = family(template), "" if template is None else template.source
    if kind == "mistral":
        return _MISTRAL if marks.ARGS in source else _MISTRAL_LIST
    if kind == "deepseek":
        return _DEEPSEEK_FENCED if "```json" in source else _DEEPSEEK
    if kind == "dsml":
        return _DSML[_wrapper(source)]
    return _PYTHON if kind == "python" else None


def _wrapper(source: str) -> str:
    """The tag around DSML's calls that a chat template names."""
    return WRAPPERS[0] if WRAPPERS[0] in source else WRAPPERS[1]


def example(template: ChatTemplate | None) -> str:
    """How a model of a template that writes calls after a mark, but no tools, is to write one; empty: otherwise."""
    spelling = _spelling(template)
    if spelling is None or template is None or "tools" in template.source:
        return ""
    arguments = '{"parameter": "value"}'
    if spelling.arguments == "dsml":
        texts, others = (f'{PARAMETER}parameter" string="{text}">value{PARAMETER_END}\n' for text in ("true", "false"))
        arguments = f"\n{texts}{others}{INVOKED}"
    call = spelling.before.replace("{}", "name") + arguments + spelling.after
    return spelling.mark + spelling.open + call + spelling.close


def call_parser(
    template: ChatTemplate | None, names: Collection[str], *, parallel: bool, prefix: str, required: bool
) -> CallParser:
    """A parser of one answer; arguments as for :class:`CallParser`."""
    kind = family(template)
    if kind == "python":
        return marks.PythonCalls(names, parallel=parallel, prefix=prefix, required=required)
    if kind == "dsml" and template is not None:
        return DsmlCalls(names, _wrapper(template.source), parallel=parallel, prefix=prefix, required=required)
    form = {"mistral": marks.MISTRAL, "deepseek": marks.DEEPSEEK}.get(kind)
    if form is not None:
        return marks.NamedCalls(names, form, parallel=parallel, prefix=prefix, required=required)
    return CallParser(names, tagged=kind == "tagged", parallel=parallel, prefix=prefix, required=required)


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
    if DSML in source:
        return "dsml"
    if marks.CALL_BEGIN in source:  # DeepSeek's own templates write calls, but no tools
        return "deepseek"
    if "tools" not in source:
        return "generic"
    if OPEN in source:
        return "tagged"
    if marks.TOOL_CALLS in source:
        return "mistral"
    if marks.PYTHON_OPEN in source:
        return "python"
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
    if (spelling := _spelling(template)) is not None:
        return _marked_grammar(tools, spelling, answer, required=required, parallel=parallel)
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
    if (spelling := _spelling(template)) is not None:
        both = (schemas, [ANY_OBJECT] * len(tools))
        written = [_lazy_marked_grammar(tools, made, spelling, parallel) for made in both]
        return LazyForm(spelling.mark, "", tuple(dict.fromkeys(written)))
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


def _marked_grammar(
    tools: Sequence[Tool], spelling: Spelling, answer: Form | None, *, required: bool, parallel: bool
) -> str:
    """As :func:`call_grammar`, for calls after a mark."""
    made = _rules(spelling)
    rules = ["%llguidance {}"]
    call = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f"({literal(spelling.between)} call)*" if parallel and spelling.between else "call*" if parallel else ""
    section = " ".join([literal(spelling.open)] * bool(spelling.open) + ["call", more, *_lines(spelling.close)])
    if required or answer is not None:
        rules.append(f"start: section{'' if answer is None else ' | answer'}")
        rules.append(f"section: {literal(spelling.mark)} {section}")
        if answer is not None:
            rules.append(f"answer: %json {json.dumps(_compact(answer[1], answer[2]))}")
    else:
        rules += ["start: (begun section)? TEXT", f"begun[lazy]: TEXT {literal(spelling.mark)}", f"section: {section}"]
        rules.append(r"TEXT: /(.|\n)*/")
    rules.append(f"call: {call}")
    for i, tool in enumerate(tools):
        schema = tool.parameters if required or tool.strict else ANY_OBJECT
        before, after = _before(spelling, tool.name, literal), _literal(spelling.after)
        if spelling.arguments != "json":
            arguments = _written(made, _bounded(schema, tool.field))
        else:
            arguments = f"arguments_{i}"
            rules.append(f"{arguments}: %json {json.dumps(_compact(schema, tool.field))}")
        rules.append(f"call_{i}: {before} {arguments} {'id? ' if spelling is _MISTRAL_LIST else ''}{after}")
    rules += [r'id: ", \"id\": \"" /[A-Za-z0-9_-]{1,40}/ "\""', _CALL_ID]
    return "\n".join([*rules, *made.rules, *([] if spelling.arguments == "json" else [_terminals(made, briefly=True)])])


def _rules(spelling: Spelling) -> JsonRules:
    """What collects the rules of arguments."""
    return DsmlRules() if spelling.arguments == "dsml" else JsonRules(python=spelling.arguments == "python")


def _written(made: JsonRules, schema: Mapping[str, Any]) -> str:
    """The rule of a call's arguments as its family writes them."""
    if isinstance(made, DsmlRules):
        return made.parameters(schema)
    return made.keywords(schema) if made.python else made.arguments(schema)


def _terminals(made: JsonRules, *, briefly: bool = False) -> str:
    """The terminals that the rules need; ``briefly``: DSML has at most one white space in a row."""
    if isinstance(made, DsmlRules):
        return (TERMINALS.replace(WHITE, r"[ \n]") if briefly else TERMINALS) + DSML_TERMINALS
    return PYTHON_TERMINALS if made.python else TERMINALS


_CALL_ID = f"call_id: {literal(marks.CALL_ID)} /[A-Za-z0-9]{{9}}/"
"""A call's id, which some of Mistral's models write between name and arguments."""


def _before(spelling: Spelling, name: str, write: Callable[[str], str]) -> str:
    """Lark of a call up to its arguments."""
    if spelling is _MISTRAL:
        return f"{write(name)} call_id? {write(marks.ARGS)}"
    return write(spelling.before.replace("{}", name))


def _literal(text: str) -> str:
    return literal(text) if text else ""


def _lines(text: str) -> list[str]:
    """Terminals of a text and of the line break before it. Two that begin with the same characters must not differ in
    the midst, as lexemes are matched greedily."""
    return [literal(part) for part in re.split(r"(?<=^\n)(?=<)", text) if part]


def _bounded(schema: Any, field: str) -> Any:
    """A schema within its limits.

    Raises:
        RequestError: It exceeds one; the error names the field.
    """
    try:
        bounded(schema)
    except SchemaError as error:
        raise wrong(field, str(error)) from None
    return schema


def _lazy_marked_grammar(
    tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]], spelling: Spelling, parallel: bool
) -> str:
    """Calls from their mark on, as the model spells them."""
    made = _rules(spelling)
    more = f"({_loose(spelling.between)} WS? call)*" if parallel else ""
    end = f"WS? {_loose(spelling.close)}" if spelling.close else ""
    gap = "WS" if spelling.open.strip() and spelling.open.endswith("\n") else "WS?"  # a fence's word ends with its line
    rules = ["%llguidance {}", f"start: open WS? {_loose(spelling.open.strip())} {gap} call {more} {end} | OTHER"]
    rules += [f"open[lazy]: TEXT {literal(spelling.mark)}", r"TEXT: /(.|\n)*/"]
    rules.append(rf"OTHER: /(.|\n)*/ & ~/(.|\n)*{re.escape(spelling.mark)}(.|\n)*/")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        arguments = _written(made, schema)
        write = literal if spelling.arguments == "dsml" else _loose  # the space in a tag must be there
        before, after = _before(spelling, tool.name, write), _loose(spelling.after)
        ending = f"WS? {'id? ' if spelling is _MISTRAL_LIST else ''}{after}" if after else ""
        rules.append(f"call_{i}: {before} WS? {arguments} {ending}")
    rules += [r'id: "," WS? "\"id\"" WS? ":" WS? /"[A-Za-z0-9_-]{1,40}"/ WS?', _CALL_ID]
    return "\n".join([*rules, *made.rules, _terminals(made)])


def _loose(text: str) -> str:
    """Lark of a text between whose parts any white space may be."""
    return " ".join("WS?" if part.isspace() else literal(part) for part in re.split(r"(\s+)", text) if part)


def _schema(tool: Tool) -> Mapping[str, Any]:
    """A tool's schema; any object where it exceeds a limit."""
    try:
        bounded(tool.parameters)
    except SchemaError:
        return ANY_OBJECT
    return tool.parameters
