"""The table of fields, against the field lists of the APIs, and each entry against a server."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from ollama._types import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Options
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from bitnet.server.api import known_fields
from bitnet.server.api.known_fields import Known

VLLM = set(
    """
    best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words add_special_tokens structured_outputs
    priority request_id logits_processors return_tokens_as_token_ids return_token_ids cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs session_id stream_interval truncation_side thinking_token_budget
    logprob_token_ids return_token_offsets return_weight_versions routed_experts_prompt_start watermarking
    mm_payload return_mm_kwargs
    """.split()  # noqa: SIM905
)
"""What vLLM's chats and completions add."""
VLLM_CHAT = set(
    """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    include_reasoning mm_processor_kwargs media_io_kwargs return_prompt_text
    """.split()  # noqa: SIM905
)
LLAMA_CPP = set(
    """
    n_predict n_indent n_keep n_discard t_max_predict_ms cache_prompt id_slot return_progress return_tokens
    timings_per_token post_sampling_probs response_fields lora n_probs min_keep samplers grammar json_schema
    dynatemp_range dynatemp_exponent typical_p repeat_penalty repeat_last_n top_k min_p dry_multiplier
    dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold
    mirostat mirostat_tau mirostat_eta top_n_sigma ignore_eos
    """.split()  # noqa: SIM905
)
"""What llama.cpp's server adds."""
LLAMA_CPP_OWN = LLAMA_CPP | set(
    """
    seed temperature top_p presence_penalty frequency_penalty logit_bias stop stream max_tokens cache_prompt
    adaptive_target adaptive_decay backend_sampling grammar_lazy grammar_triggers preserved_tokens
    """.split()  # noqa: SIM905
)
"""What its own completions and gaps take besides prompts."""
LLAMA_CPP_CHAT = set(
    """
    reasoning_format thinking_forced_open parse_tool_calls chat_template_kwargs
    """.split()  # noqa: SIM905
)


def annotated(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in kind.__annotations__}


LISTS: dict[str, tuple[Known, set[str]]] = {
    "/v1/chat/completions": (
        known_fields.CHAT,
        {*annotated(chat_params.CompletionCreateParamsBase), *VLLM, *VLLM_CHAT, *LLAMA_CPP, *LLAMA_CPP_CHAT, "stream"},
    ),
    "/v1/completions": (
        known_fields.COMPLETIONS,
        {*annotated(completion_create_params.CompletionCreateParamsBase), *VLLM, *LLAMA_CPP, "stream"},
    ),
    "/completion": (known_fields.LLAMA_COMPLETION, LLAMA_CPP_OWN | {"prompt"}),
    "/v1/responses": (
        known_fields.RESPONSES,
        {*annotated(response_create_params.ResponseCreateParamsBase), "stream"},
    ),
    "/v1/messages": (
        known_fields.MESSAGES,
        annotated(
            message_create_params.MessageCreateParamsBase,
            beta_params.MessageCreateParamsBase,
            message_count_tokens_params.MessageCountTokensParams,
        )
        | {"stream", "temperature", "top_p", "top_k", "stop_sequences", "mcp_servers", "output_format"},
    ),
    "/api/chat": (known_fields.OLLAMA_CHAT, set(ChatRequest.model_fields)),
    "/api/generate": (known_fields.OLLAMA_GENERATE, set(GenerateRequest.model_fields)),
    "/v1/embeddings": (known_fields.EMBEDDINGS, annotated(embedding_create_params.EmbeddingCreateParams)),
    "/api/embed": (known_fields.OLLAMA_EMBED, set(EmbedRequest.model_fields)),
    "/api/embeddings": (known_fields.OLLAMA_EMBEDDINGS, set(EmbeddingsRequest.model_fields)),
    "/v1/rerank": (known_fields.RERANK, {"model", "query", "documents", "top_n"}),
    "options": (known_fields.OLLAMA_OPTIONS, set(Options.model_fields)),
}
PLACES = [(path, name) for path, (table, _) in LISTS.items() for name in sorted(table.done)]
REFUSED = [(path, name) for path, (table, _) in LISTS.items() for name in sorted(table.refused)]
MESSAGE = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY = {"temperature": 0, "num_predict": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGE, "temperature": 0, "max_tokens": 1},
    "/v1/completions": {"prompt": "Once upon", "temperature": 0, "max_tokens": 1},
    "/completion": {"prompt": "Once upon", "temperature": 0, "max_tokens": 1, "top_k": 5, "n_probs": 0},
    "/v1/responses": {"input": "What is 17 + 25?", "temperature": 0, "max_output_tokens": 1},
    "/v1/messages": {"model": "demo", "messages": MESSAGE, "temperature": 0, "max_tokens": 1},
    "/api/chat": {
        "model": "demo",
        "messages": MESSAGE,
        "stream": False,
        "options": GREEDY,
    },
    "/api/generate": {
        "model": "demo",
        "prompt": "What is 17 + 25?",
        "stream": False,
        "options": GREEDY,
    },
}


BODIES |= {
    "/v1/embeddings": {"input": "What is 17 + 25?"},
    "/api/embed": {"model": "demo", "input": "What is 17 + 25?"},
    "/api/embeddings": {"model": "demo", "prompt": "What is 17 + 25?"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hi", "What is 17 + 25?"]},
}


def ask(server: Any, path: str, values: dict[str, Any]) -> Any:
    if path == "options":
        path, values = "/api/chat", {"options": {**GREEDY, **values}}
    body = {**BODIES[path], **values}
    if "n_predict" in values:  # another name of this one
        del body["max_tokens"]
    return server.client.post(path, json=body)


@pytest.mark.parametrize("path", LISTS)
def test_every_field_of_the_apis_is_in_the_table_once(path: str) -> None:
    table, names = LISTS[path]
    assert names - table.done - set(table.refused) - table.harmless == set()
    for first, second in ((table.done, table.harmless), (table.done, table.refused), (table.harmless, table.refused)):
        assert not set(first) & set(second)


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_a_done_field_is_read(demo: Any, path: str, name: str) -> None:
    """What is not even text, a number, an object or a list of either is an error of that field."""
    values: list[Any] = [[[[]]], 1e300, {"": [0]}]
    answers = [ask(demo, path, {name: value}) for value in values]
    assert any(answer.status_code == 400 and name in answer.text for answer in answers)


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_a_refused_field_is_refused_unless_it_asks_for_nothing(demo: Any, path: str, name: str) -> None:
    table = LISTS[path][0]
    refusal = table.refused[name]
    needed = dict.fromkeys(refusal.needs[:1], 1.5)
    answer = ask(demo, path, {name: 7 if refusal.falsy else False, **needed})
    assert answer.status_code == 400, answer.text
    assert f"{name} is not supported: {refusal.why}"[:60] in answer.text
    for value in (None, *((0,) if refusal.falsy else ()), *refusal.neutral):
        assert ask(demo, path, {name: value, **needed}).status_code == 200
    if needed:
        assert ask(demo, path, {name: 7}).status_code == 200


@pytest.mark.parametrize("path", LISTS)
def test_harmless_fields_change_nothing(demo: Any, path: str) -> None:
    def said(answer: Any) -> str:
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for name in ("choices", "content", "message", "response", "data", "embeddings", "embedding", "results"):
            if name in found:
                return str(found[name])
        return "".join(part["text"] for item in found["output"] for part in item["content"])

    harmless = LISTS[path][0].harmless - {"metadata"}  # of which the answer has a copy
    assert said(ask(demo, path, dict.fromkeys(harmless, 3))) == said(ask(demo, path, {}))
