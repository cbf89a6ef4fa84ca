"""A Jinja2 sandbox with a bound: a template from a model file may be hostile, and must end soon and stay small.

Jinja2's own sandbox keeps templates from the attributes and objects of Python, but lets them run and grow without end.
Here every round of a loop, every call and every expression costs what it could make, estimated before it is done, and a
rendering has a fixed sum to spend: about a second, or some hundred megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 100_000
"""Characters of a template at most; several times the largest in use."""
BUDGET = 300_000_000
"""Characters and elements a rendering may make, by estimate."""
ROUND_COST = 1_000
"""What a round of a loop or a call costs at least; it can copy the template's text, so it costs that if it is more."""
ITEM_COST = 200
"""What looking at one element of a list or mapping costs."""
MAX_BITS = 4096
"""Length of an integer."""


class _Generation(ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: what the assistant wrote, marked for training. Just text here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS = (ext.loopcontrols, _Generation)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of one template, for one rendering at a time; :meth:`reset` begins one.

    Args:
        source: The template.
        filters: Further filters.
        functions: Further global functions.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(
        self, source: str, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS, finalize=self._write)
        self._round_cost = max(ROUND_COST, len(source))
        self.reset()
        del self.globals["lipsum"]
        self.globals.update(functions)
        own = {"_each": self._each, "_concat": _concat, "format": _format}
        all_filters = {**self.filters, **filters, **own}
        self.filters = {name: self._bounded(function) for name, function in all_filters.items()}
        if len(source) > MAX_SOURCE:
            raise SecurityError(f"it has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        tree = _Guard(self).visit(self.parse(source))
        self.template = Template.from_code(self, self.compile(tree), self.make_globals(None))

    def reset(self) -> None:
        """Begin anew with the whole budget."""
        self._left = BUDGET

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._spend(__self._round_cost)
        if isinstance(__obj, BuiltinMethodType):
            __self._charge(__obj.__self__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_widths(value.__self__)
            self._charge(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
            self._charge(left, (right,), {})
        elif operator == "+":
            self._spend(self._size(left) + self._size(right))
        elif operator in ("*", "**"):
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > MAX_BITS:
                    raise SecurityError("it makes an integer that is too large")
            else:
                self._spend(self._amount(left) * self._amount(right))
        return super().call_binop(context, operator, left, right)

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise SecurityError("it takes too much work")

    def _charge(self, subject: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Pay for what a call could make: its subject, once more for every unit of its arguments."""
        amounts = map(self._amount, [*args, *kwargs.values()])
        self._spend(self._size(subject) * (1 + sum(amounts)))

    def _amount(self, value: Any) -> int:
        """How much an argument can multiply: a number by its value, all else by its size."""
        return abs(value) if isinstance(value, int) else self._size(value)

    def _size(self, value: Any) -> int:
        """Characters and elements in a value, at least 1, with all that is inside it, as often as it is there."""
        size, stack = 0, [value]
        while stack:
            item = stack.pop()
            size += 1
            if isinstance(item, (str, bytes)):
                size += len(item)
            elif isinstance(item, (list, tuple, set, frozenset, Mapping)):
                self._spend(ITEM_COST * (1 + len(item)))
                stack += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
        return size

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(self._round_cost)
            yield item

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        subject = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._spend(self._round_cost)
            self._charge(args[subject], args[subject + 1 :], kwargs)
            return function(*args, **kwargs)

        return bounded

    def _write(self, value: Any) -> Any:
        self._spend(self._size(value))
        return value


def _check_widths(format: str) -> None:
    """Refuse a format that could fill up to a width out of proportion."""
    if re.search(r"%[^a-zA-Z]*(\d{5}|\*)|\{[^}]*:[^}]*\d{5}", format):
        raise SecurityError("it formats to a width that is too large")


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Jinja2's own filter of this name, for formats whose widths are sound."""
    _check_widths(str(value))
    return do_format(value, *args, **kwargs)


def _concat(parts: Iterable[Any]) -> str:
    return "".join(map(str, parts))


class _Guard(NodeTransformer):
    """Sends what loops go through, and what ``~`` joins, through filters, which are paid for."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("recursive loops are not supported")
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _filter(self, value: nodes.Node, name: str) -> nodes.Node:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno).set_environment(self.environment)
