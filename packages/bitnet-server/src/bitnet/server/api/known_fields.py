"""What becomes of every field of a request, for each API: done, refused, or harmless.

A *done* field does what its API says. A *refused* one would change the answer, but is not supported: it is answered
with 400, unless its value asks for nothing. A *harmless* one changes no answer: it names the user, tunes another
program's hardware, or belongs to a refused one. Fields in none of the lists are unknown, and ignored, as the originals
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet.server.request.errors import unsupported
from bitnet.server.request.fields import Fields


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused field.

    Attributes:
        why: The reason, and what to use instead.
        neutral: Values that ask for nothing, besides None.
        falsy: Whether False, 0 and empty values ask for nothing, too.
        needs: Fields one of which must be set, and not to 0 or 1, for this one to matter; empty: it always does.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    needs: tuple[str, ...] = ()
    falsy: bool = True

    def applies(self, fields: Fields, name: str) -> bool:
        """Whether the field's value asks for something."""
        value = fields.values.get(name)
        if value is None or value in self.neutral or (self.falsy and not value):
            return False
        return not self.needs or any(fields.values.get(other) not in (None, 0, 1) for other in self.needs)


@dataclass(frozen=True, slots=True)
class Known:
    """The fields of one kind of request."""

    done: frozenset[str]
    refused: Mapping[str, Refusal]
    harmless: frozenset[str]

    def check(self, fields: Fields) -> None:
        """Refuse fields that ask for something unsupported.

        Raises:
            RequestError: There is one; the error names it.
        """
        for name in fields.values:
            if (refusal := self.refused.get(name)) is not None and refusal.applies(fields, name):
                raise unsupported(fields.name(name), refusal.why)


def _known(done: str, harmless: str, *refused: Mapping[str, Refusal], **more: Refusal) -> Known:
    """Fields by name, in words; ``done`` overrides ``refused``."""
    names = frozenset(done.split())
    every = {name: refusal for group in (*refused, more) for name, refusal in group.items() if name not in names}
    return Known(names, every, frozenset(harmless.split()))


_TEXT_ONLY = Refusal("the model reads and writes text only.")
_OTHER_SAMPLERS = "use temperature, top_k, top_p and min_p."
_NO_CONTINUED_RANGE = "penalties count the whole prompt and answer."
_PENALTIES = ("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty")

SAMPLERS = {
    "mirostat": Refusal(_OTHER_SAMPLERS),
    "typical_p": Refusal(_OTHER_SAMPLERS, (1,)),
    "tfs_z": Refusal(_OTHER_SAMPLERS, (1,)),
    "dynatemp_range": Refusal(_OTHER_SAMPLERS),
    "top_n_sigma": Refusal(_OTHER_SAMPLERS, (-1,)),
    "dry_multiplier": Refusal("use repetition_penalty, presence_penalty or frequency_penalty."),
    "xtc_probability": Refusal(_OTHER_SAMPLERS),
    "adaptive_target": Refusal(_OTHER_SAMPLERS, (-1,)),
    "min_keep": Refusal(_OTHER_SAMPLERS),
    "repeat_last_n": Refusal(_NO_CONTINUED_RANGE, (-1,), _PENALTIES),
}
"""Ways of sampling of llama.cpp and Ollama."""

_SAMPLER_DETAILS = """
    mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    xtc_threshold adaptive_decay
"""

EXTENSIONS = {
    "best_of": Refusal("use n.", (1,)),
    "use_beam_search": Refusal("beam search is not implemented."),
    "length_penalty": Refusal("beam search is not implemented.", (1,)),
    "guided_json": Refusal("use structured_outputs."),
    "guided_regex": Refusal("use structured_outputs."),
    "guided_grammar": Refusal("use structured_outputs."),
    "guided_choice": Refusal("use structured_outputs."),
    "guided_decoding_backend": Refusal("use structured_outputs."),
    "guided_whitespace_pattern": Refusal("use structured_outputs."),
    "grammar_lazy": Refusal("a grammar holds from the answer's first token on."),
    "skip_special_tokens": Refusal("the text of an answer has no special tokens.", (True,), falsy=False),
    "truncate_prompt_tokens": Refusal("shorten the prompt."),
    "n_probs": Refusal("use logprobs."),
    "logprob_token_ids": Refusal("use top_logprobs, or logprobs in /v1/completions."),
    "return_token_offsets": Refusal("/tokenize gives a text's tokens."),
    "return_weight_versions": Refusal("weights have no versions."),
    "routed_experts_prompt_start": Refusal("answers do not say which experts computed them."),
    "watermarking": Refusal("answers are not marked."),
    "post_sampling_probs": Refusal("log-probabilities are those of the model's unchanged logits."),
    "logits_processors": Refusal("use logit_bias, allowed_token_ids or bad_words."),
    "return_tokens": Refusal("/tokenize gives a text's tokens."),
    "response_fields": Refusal("answers come with all their fields."),
    "lora": Refusal("adapters are not supported."),
    "t_max_predict_ms": Refusal("use max_tokens, or the server's --timeout.", (-1,)),
    "n_indent": Refusal("use stop."),
    "repetition_detection": Refusal("use repetition_penalty."),
    "documents": Refusal("put them into a message."),
    "chat_template": Refusal("the model's own chat template is used; /v1/completions uses none."),
    "image_data": _TEXT_ONLY,
    "multimodal_data": _TEXT_ONLY,
    "mm_payload": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
}
"""Fields that vLLM and llama.cpp add to OpenAI's API."""

_SAMPLING = """
    temperature top_p top_k min_p min_tokens presence_penalty frequency_penalty repetition_penalty repeat_penalty
    logit_bias seed stop stop_token_ids ignore_eos allowed_token_ids bad_words include_stop_str_in_output
"""
_OPENAI = f"""
    model stream stream_options n x_bitnet_receipt structured_outputs response_format json_schema grammar samplers
    {_SAMPLING}
"""
_VLLM = "prompt_logprobs return_token_ids return_tokens_as_token_ids timings_per_token"
_OPENAI_HARMLESS = f"""
    user metadata store service_tier safety_identifier moderation prompt_cache_key prompt_cache_options
    prompt_cache_retention
    cache_prompt id_slot n_keep n_discard n_cache_reuse return_progress samplers_seq
    reasoning_format reasoning_in_content thinking_forced_open parse_tool_calls sse_ping_interval
    speculative.n_max speculative.n_min speculative.p_min speculative.type backend_sampling
    grammar_triggers preserved_tokens
    spaces_between_special_tokens priority request_id session_id cache_salt vllm_xargs
    kv_transfer_params ec_transfer_params stream_interval truncation_side return_mm_kwargs
    {_SAMPLER_DETAILS}
"""

CHAT = _known(
    f"""messages max_tokens max_completion_tokens n_predict logprobs top_logprobs tools tool_choice parallel_tool_calls
    modalities continue_final_message add_generation_prompt chat_template_kwargs enable_thinking
    reasoning_effort reasoning thinking thinking_token_budget include_reasoning prediction {_VLLM} {_OPENAI}""",
    f"reasoning_budget verbosity {_OPENAI_HARMLESS}",
    SAMPLERS,
    EXTENSIONS,
    audio=_TEXT_ONLY,
    functions=Refusal("it is the old name of tools; use tools."),
    function_call=Refusal("it is the old name of tool_choice; use tool_choice.", ("none", "auto")),
    web_search_options=Refusal("this server reaches no web."),
    echo=Refusal("/v1/completions has it."),
    add_special_tokens=Refusal("the chat template writes them."),
    return_prompt_text=Refusal("/apply-template gives it."),
)
"""``/v1/chat/completions``."""

COMPLETIONS = _known(
    f"prompt max_tokens n_predict echo logprobs best_of add_special_tokens {_VLLM} {_OPENAI}",
    _OPENAI_HARMLESS,
    SAMPLERS,
    EXTENSIONS,
    suffix=Refusal("the model continues a text; it does not fill gaps."),
    prompt_embeds=_TEXT_ONLY,
    thinking_token_budget=Refusal("/v1/chat/completions has it."),
)
"""``/v1/completions``."""

_LLAMA = f"""
    n_predict max_tokens n_probs post_sampling_probs return_tokens response_fields timings_per_token
    {_OPENAI}
"""
LLAMA_COMPLETION = _known(f"prompt {_LLAMA}", _OPENAI_HARMLESS, SAMPLERS, EXTENSIONS)
"""llama.cpp's ``/completion``."""

INFILL = _known(
    f"input_prefix input_suffix input_extra prompt {_LLAMA}",
    _OPENAI_HARMLESS,
    SAMPLERS,
    EXTENSIONS,
)
"""llama.cpp's ``/infill``."""

RESPONSES = _known(
    """model input instructions previous_response_id store stream stream_options temperature top_p max_output_tokens
    text tools tool_choice parallel_tool_calls include reasoning background top_logprobs x_bitnet_receipt""",
    """metadata client_metadata service_tier safety_identifier user moderation truncation max_tool_calls
    prompt_cache_key prompt_cache_options prompt_cache_retention""",
    conversation=Refusal("conversations are not stored; send the whole conversation as input."),
    prompt=Refusal("prompts are not stored."),
    context_management=Refusal("conversations are not compacted; shorten the input."),
)
"""``/v1/responses``."""

_REACHES_NOTHING = Refusal("this server reaches no others.")
MESSAGES = _known(
    """model messages max_tokens system temperature top_p top_k stop_sequences stream tools tool_choice thinking
    output_config output_format context_management x_bitnet_receipt""",
    """metadata service_tier cache_control diagnostics inference_geo speed user_profile_id workspace_id betas
    billing_policy fallback_credit_token fallbacks""",
    mcp_servers=_REACHES_NOTHING,
    container=Refusal("this server runs no code."),
    compaction=Refusal("conversations are not compacted; shorten the messages."),
    thread=Refusal("conversations are not stored; send all messages."),
)
"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

_OLLAMA = "model stream format options keep_alive logprobs top_logprobs x_bitnet_receipt"
OLLAMA_CHAT = _known(f"messages tools tool_choice parallel_tool_calls think {_OLLAMA}", "")
"""``/api/chat``."""
OLLAMA_GENERATE = _known(
    f"prompt system raw context think {_OLLAMA}",
    "",
    images=_TEXT_ONLY,
    width=_TEXT_ONLY,
    height=_TEXT_ONLY,
    steps=_TEXT_ONLY,
    suffix=Refusal("the model continues a text; it does not fill gaps."),
    template=Refusal("the model's own chat template is used; with raw, none."),
)
"""``/api/generate``."""
EMBEDDINGS = _known(
    "input model encoding_format dimensions pooling truncate_prompt_tokens",
    "user priority request_id embd_normalize",
    add_special_tokens=Refusal("texts get the model's special tokens; send token ids for none.", (True,), falsy=False),
)
"""``/v1/embeddings``."""
RERANK = _known("model query documents top_n return_documents", "user priority request_id")
"""``/v1/rerank``."""
OLLAMA_EMBED = _known("model input truncate dimensions", "options keep_alive")
"""``/api/embed``."""
OLLAMA_EMBEDDINGS = _known("model prompt", "options keep_alive")
"""``/api/embeddings``."""
OLLAMA_PULL = _known("model name stream", "insecure username password")
"""``/api/pull``."""
_SAVED = "bitnet convert makes a file of another encoding; pull or copy that into the models folder."
OLLAMA_CREATE = _known(
    "model name from system template parameters stream",
    "license info renderer parser requires draft",
    quantize=Refusal(_SAVED),
    quantization=Refusal(_SAVED),
    files=Refusal(_SAVED),
    path=Refusal(_SAVED),
    adapters=Refusal("models run without adapters."),
    messages=Refusal("send them with each chat; system can be set."),
    modelfile=Refusal("use from, system, template and parameters."),
)
"""``/api/create``."""
OLLAMA_OPTIONS = _known(
    """num_predict temperature top_k top_p min_p repeat_penalty presence_penalty frequency_penalty stop seed""",
    f"""num_keep num_ctx num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap use_mlock vocab_only
    logits_all embedding_only draft_num_predict {_SAMPLER_DETAILS}""",
    SAMPLERS,
    penalize_newline=Refusal(_NO_CONTINUED_RANGE, (True,), _PENALTIES),
)
"""``options`` of Ollama's requests."""
