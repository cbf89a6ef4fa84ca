"""Errors of llama.cpp's endpoints."""

from __future__ import annotations

from typing import Any

from bitnet.server.api import openai
from bitnet.server.request.errors import RequestError


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of llama.cpp's server: as OpenAI's, with a type for prompts that are too long."""
    body = openai.error_body(error)
    if error.lengths is not None:
        body["error"]["type"] = "exceed_context_size_error"
    return body
