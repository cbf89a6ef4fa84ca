"""OpenAI's ``/v1/responses``: parses requests and formats answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitnet.core.errors import brief
from bitnet.server.api.known_fields import RESPONSES
from bitnet.server.api.openai import MAX_TOP_LOGPROBS, stream_options
from bitnet.server.api.response_answer import Kept, ResponseAnswer
from bitnet.server.api.response_items import listed_items, read_input
from bitnet.server.api.stored import CANCELLED
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.thinking import ThinkingChoice, read_effort
from bitnet.server.chat.tools import only_form, openai_tools, other_tools
from bitnet.server.forms.structured import checked as checked_form
from bitnet.server.forms.structured import format_of
from bitnet.server.generation.job import SSE, Background, Job, run
from bitnet.server.generation.sampling import checked, token_limit
from bitnet.server.models.service import Service
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError, as_request_error, unsupported, wrong
from bitnet.server.request.fields import Fields

LOGPROBS = "message.output_text.logprobs"


async def create(service: Service, call: Call, fields: Fields) -> None:
    """Answer a request for a response.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    job = await call.read(lambda: parse(service, fields, call.owner))
    if not fields.flag("background"):
        await run(service, call, job)
        return
    answer, work = job.answer, Background(service, call, job)
    assert isinstance(answer, ResponseAnswer)
    with service.shared.in_background(answer.id, work.end):
        await call.reply(answer.begun())
        try:
            await work()
        except Exception as error:
            answer.stopped(as_request_error(error))
            if error is not CANCELLED:
                raise


def parse(service: Service, fields: Fields, owner: bytes = b"") -> Job:
    """Parse a request for a response.

    Args:
        owner: The key to which it will belong.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    RESPONSES.check(fields)
    stream_options(fields)
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    wanted = top is not None or LOGPROBS in fields.strings("include")
    text = fields.object("text")
    form = None if text is None else text.object("format")
    instructions = fields.text("instructions")
    system: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    history = [*_before(service, fields, owner), *read_input(fields)]
    keep = fields.flag("store", True) and service.shared.settings.max_stored > 0
    if fields.flag("background"):
        if not keep:
            raise wrong(
                "background", "needs a response that is stored: leave store out, and let the server store some."
            )
        if fields.flag("stream"):
            raise unsupported("background", "a response in the background is polled, not streamed.")
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
        options=checked({**options, "logprobs": (top or 0) if wanted else None}),
        answer=ResponseAnswer(
            service, fields, options, tools, Kept(owner, history, listed_items(fields)) if keep else None
        ),
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
    if entry.response["status"] == "in_progress":
        raise wrong("previous_response_id", f"is {brief(id)}, which is still computed; poll it first.")
    return entry.messages
