"""Typed reading of a JSON body. Errors name the field. ``null`` counts as absent.

Every list and every object with names of the client's choice is read here, and its length is checked before anything is
done for each element.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from bitnet.core.errors import brief
from bitnet.server.request.errors import unsupported, wrong

LARGEST = 2**63 - 1
"""Bound of integers, which may later be converted to floats or 64-bit integers."""
MAX_LENGTH = 16_384
"""Maximum elements of a list, or members of an object, unless a field has another bound."""


class Fields:
    """An object of a request's body.

    Args:
        values: The object.
        at: The object's path in the body, such as ``messages[0]``; empty for the body itself.
    """

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self.values = values
        self._at = at

    def name(self, field: str) -> str:
        """The field's full name, for errors."""
        return f"{self._at}.{field}" if self._at else field

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) is not None

    def _typed(self, field: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.values.get(field)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise wrong(self.name(field), f"is {brief(value)}; it must be {what}.")
        return value

    def text(self, field: str, default: str | None = None) -> str | None:
        value: str | None = self._typed(field, str, "a string")
        return default if value is None else value

    def flag(self, field: str, default: bool = False) -> bool:
        value: bool | None = self._typed(field, bool, "true or false")
        return default if value is None else value

    def integer(self, field: str, low: int | None = None, high: int | None = None) -> int | None:
        value: Any = self._typed(field, (int, float), "an integer")
        if value is None:
            return None
        if not -LARGEST <= value <= LARGEST or int(value) != value:
            raise wrong(self.name(field), f"is {brief(value)}; it must be an integer of at most 64 bits.")
        return int(self._bounded(field, value, low, high))

    def number(self, field: str, low: float | None = None, high: float | None = None) -> float | None:
        value: Any = self._typed(field, (int, float), "a number")
        if value is None:
            return None
        if not -1e300 < value < 1e300:
            raise wrong(self.name(field), f"is {brief(value)}; it must be a finite number.")
        return float(self._bounded(field, value, low, high))

    def _bounded(self, field: str, value: Any, low: float | None, high: float | None) -> Any:
        if (low is not None and value < low) or (high is not None and value > high):
            range_ = f"≥ {low}" if high is None else f"≤ {high}" if low is None else f"in {low} … {high}"
            raise wrong(self.name(field), f"is {brief(value)}; it must be {range_}.")
        return value

    def choice(self, field: str, choices: Sequence[str], default: str) -> str:
        value = self.text(field, default)
        if value not in choices:
            raise wrong(self.name(field), f"is {brief(value)}; it must be one of {', '.join(choices)}.")
        assert value is not None
        return value

    def object(self, field: str, max_length: int = MAX_LENGTH) -> Fields | None:
        value: Mapping[str, Any] | None = self._typed(field, dict, "an object")
        if value is None:
            return None
        self._short(field, value, max_length, "members")
        return Fields(value, self.name(field))

    def objects(self, field: str, max_length: int = MAX_LENGTH) -> list[Fields] | None:
        """A list of objects."""
        value: list[Any] | None = self._typed(field, list, "a list of objects")
        if value is None:
            return None
        self._short(field, value, max_length)
        return list(self._each(field, value))

    def pairs(self, field: str, first: str, second: str, max_length: int = MAX_LENGTH) -> list[Fields]:
        """A list of pairs, each as an object with these two members."""
        value: list[Any] = self._typed(field, list, "a list of pairs") or []
        self._short(field, value, max_length)
        for i, pair in enumerate(value):
            if not isinstance(pair, list) or len(pair) != 2:
                raise wrong(f"{self.name(field)}[{i}]", f"is {brief(pair)}; it must be a pair: {first} and {second}.")
        return [Fields({first: a, second: b}, f"{self.name(field)}[{i}]") for i, (a, b) in enumerate(value)]

    def _each(self, field: str, values: Sequence[Any]) -> Iterator[Fields]:
        for i, value in enumerate(values):
            name = f"{self.name(field)}[{i}]"
            if not isinstance(value, dict):
                raise wrong(name, f"is {brief(value)}; it must be an object.")
            yield Fields(value, name)

    def strings(self, field: str, max_length: int = MAX_LENGTH) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty."""
        value = self._typed(field, (str, list), "a string or a list of strings")
        values = [value] if isinstance(value, str) else value or []
        self._short(field, values, max_length, "strings")
        if not all(isinstance(v, str) and v for v in values):
            raise wrong(self.name(field), f"is {brief(value)}; it must be a string or strings, none of them empty.")
        return tuple(values)

    def tokens(self, field: str, max_length: int = MAX_LENGTH) -> list[int] | None:
        """A list of token ids, which may not be in the vocabulary."""
        value: list[int] | None = self._typed(field, list, "a list of token ids")
        if value is not None:
            self._short(field, value, max_length, "tokens")
            if not are_tokens(value):
                raise wrong(self.name(field), f"is {brief(value)}; it must be a list of token ids.")
        return value

    def _short(self, field: str, values: Collection[Any], max_length: int, what: str = "elements") -> None:
        if len(values) > max_length:
            raise wrong(self.name(field), f"has {len(values):,} {what}; at most {max_length:,} are allowed.")

    def require(self, field: str) -> None:
        if field not in self:
            raise wrong(self.name(field), "is missing.")

    def refuse(self, reasons: Mapping[str, str], neutral: Sequence[Any] = (None, False, [], {}, "")) -> None:
        """Refuse fields, with reasons, unless their values are neutral."""
        for field, why in reasons.items():
            if not any(self.values.get(field) is n or self.values.get(field) == n for n in neutral):
                raise unsupported(self.name(field), why)


def are_tokens(values: Sequence[Any]) -> bool:
    """Whether all are integers that may be token ids."""
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
