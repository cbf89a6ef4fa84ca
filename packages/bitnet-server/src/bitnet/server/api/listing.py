"""Lists of OpenAI's API, in pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bitnet.core.errors import brief
from bitnet.server.request.call import Call
from bitnet.server.request.errors import wrong

T = TypeVar("T")


def page(
    call: Call, items: Sequence[T], document: Callable[[T], dict[str, Any]], *, limit: int, max_limit: int
) -> dict[str, Any]:
    """The page of a list that a request asks for with ``limit``, ``order`` and ``after``.

    Args:
        items: All of them, the newest first.
        document: Describes one.
        limit: Items of a page, unless the request says otherwise.

    Raises:
        RequestError: A parameter is invalid.
    """
    query = call.query()
    order, asked, after = query.get("order", "desc"), query.get("limit", str(limit)), query.get("after")
    if order not in ("asc", "desc"):
        raise wrong("order", f"is {brief(order)}; it must be asc or desc.")
    if not asked.isascii() or not asked.isdigit() or not 0 < int(asked[:9]) <= max_limit:
        raise wrong("limit", f"is {brief(asked)}; it must be in 1 … {max_limit:,}.")
    found = [document(item) for item in (items if order == "desc" else reversed(items))]
    ids = [one["id"] for one in found]
    if after is not None and after not in ids:
        raise wrong("after", f"is {brief(after)}, which is not in the list.")
    begin = 0 if after is None else ids.index(after) + 1
    end = begin + int(asked)
    return {
        "object": "list",
        "data": found[begin:end],
        "first_id": next(iter(ids[begin:end]), None),
        "last_id": next(reversed(ids[begin:end]), None),
        "has_more": end < len(ids),
    }
