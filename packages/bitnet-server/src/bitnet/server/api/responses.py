"""OpenAI's ``/v1/responses``: parses requests and formats answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitnet.core.errors import brief
from bitnet.server.api.known_fields import RESPONSES
from bitnet.server.api.openai import stream_options
from bitnet.server.api.response_answer import ResponseAnswer
from bitnet.server.api.response_items import read_input
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.thinking import ThinkingChoice, read_effort
from bitnet.server.chat.tools import only_form, openai_tools, other_tools
from bitnet.server.forms.structured import checked as checked_form
from bitnet.server.forms.structured import format_of
from bitnet.server.generation.job import SSE, Job, run
from bitnet.server.generation.sampling import checked, token_limit
from bitnet.server.models.service import Service
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError, unsupported
from bitnet.server.request.fields import Fields

LOGPROBS = "message.output_text.logprobs"


async def create(service: Service, call: Call, fields: Fields) -> None:
    """Answer a request for a response.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    await run(service, call, await call.read(lambda: parse(service, fields, call.owner)))


def parse(service: Service, fields: Fields, owner: bytes = b"") -> Job:
    """Parse a request for a response.

    Args:
        owner: The key to which it will belong.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    RESPONSES.check(fields)
    stream_options(fields)
    if LOGPROBS in fields.strings("include"):
        raise unsupported("include", RESPONSES.refused["top_logprobs"].why)
    text = fields.object("text")
    form = None if text is None else text.object("format")
    instructions = fields.text("instructions")
    system: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    history = [*_before(service, fields, owner), *read_input(fields)]
    keep = fields.flag("store", True) and service.shared.settings.max_stored > 0
    tools = openai_tools(fields, nested=False)
    temperature, top_p = fields.number("temperature", 0, 2), fields.number("top_p", 0, 1)
    reasoning = fields.object("reasoning") or Fields({}, "reasoning")
    how = ChatPrompt(thinking=ThinkingChoice(effort=read_effort(reasoning, "effort")))
    most = token_limit(fields, "max_output_tokens")
    given = {"max_tokens": most, "temperature": temperature, "top_p": top_p}
    options = {
        "reasoning_budget": service.reasoning_budget(how.thinking),
        **{"max_tokens": None, "temperature": 1.0, "top_p": 1.0, **service.preset.sampling},
        **{name: value for name, value in given.items() if value is not None},
    }
    asked = checked_form(None if form is None else format_of(form, form), fields)
    return Job(
        prompts=lambda: [service.chat_tokens([*system, *history], tools, how)],
        options=checked(options),
        answer=ResponseAnswer(service, fields, options, tools, (owner, history) if keep else None),
        stream=SSE if fields.flag("stream") else None,
        form=only_form(tools, asked, service.model.chat_template),
        receipt=fields.flag("x_bitnet_receipt"),
        ignored=other_tools(fields, "function", "custom"),
    )


def _before(service: Service, fields: Fields, owner: bytes) -> Sequence[dict[str, Any]]:
    """The conversation that ``previous_response_id`` continues."""
    id = fields.text("previous_response_id")
    if id is None:
        return ()
    if (entry := service.shared.stored.get(owner, id)) is None:
        raise RequestError(
            400,
            f"There is no response {brief(id)}; it was not stored, or it was forgotten. Send the whole conversation.",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    return entry.messages
