"""Programming agents, and how each is told to use a server and a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KEY = "BITNET_API_KEY"
"""Variable by which Codex learns the key."""


class Endpoint(NamedTuple):
    """A server, as its clients are told of it.

    Attributes:
        url: Address without a slash at its end.
        model: The model's name.
        context: Tokens that the model's context holds.
    """

    url: str
    key: str
    model: str
    context: int


@dataclass(frozen=True, slots=True)
class Client:
    """A programming agent.

    Attributes:
        title: Its name for people.
        program: Its command.
        package: What npm installs it from.
        words: Words of its command line before the user's.
        variables: Its environment variables.
        unset: Variables that would lead it to another server.
    """

    title: str
    program: str
    package: str
    words: Callable[[Endpoint], Sequence[str]]
    variables: Callable[[Endpoint], Mapping[str, str]]
    unset: tuple[str, ...] = ()


def _claude(at: Endpoint) -> dict[str, str]:
    kinds = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    return {
        "ANTHROPIC_BASE_URL": at.url,
        "ANTHROPIC_AUTH_TOKEN": at.key,
        **dict.fromkeys(kinds, at.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(at.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex(at: Endpoint) -> list[str]:
    provider = {"name": "bitnet", "base_url": f"{at.url}/v1", "wire_api": "responses", "env_key": KEY}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = {
        "model_providers.bitnet": f"{{ {table} }}",
        "model_provider": '"bitnet"',
        "model": json.dumps(at.model),
        "model_context_window": str(at.context),
    }
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def _opencode(at: Endpoint) -> dict[str, str]:
    limit = {"context": at.context, "output": at.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "bitnet",
        "options": {"baseURL": f"{at.url}/v1", "apiKey": at.key},
        "models": {at.model: {"limit": limit}},
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"bitnet": provider}, "model": f"bitnet/{at.model}"})}


CLIENTS: Mapping[str, Client] = {
    client.program: client
    for client in (
        Client(
            *("Claude Code", "claude", "@anthropic-ai/claude-code"),
            words=lambda at: (),
            variables=_claude,
            unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
        ),
        Client("Codex", "codex", "@openai/codex", words=_codex, variables=lambda at: {KEY: at.key}),
        Client("opencode", "opencode", "opencode-ai", words=lambda at: (), variables=_opencode),
    )
}
"""The agents by their commands."""
