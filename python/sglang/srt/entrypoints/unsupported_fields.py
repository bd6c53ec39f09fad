"""Request fields with a meaning that this server lacks. They are refused by name: without them the answer is another.

Names that nobody defines are ignored. So is a value that asks for nothing (null, false, empty, or a field's default).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.entrypoints.http_errors import bad_request

_MAX_NEUTRAL_BYTES = 256
"""A longer value asks for something."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a field is refused, and which values besides the empty ones are what the server does anyway."""

    reason: str
    neutral: tuple[Any, ...] = ()


def _all(reason: str, *names: str, neutral: tuple[Any, ...] = ()) -> dict[str, Unsupported]:
    return dict.fromkeys(names, Unsupported(reason, neutral))


_SESSIONS = "sessions belong to /generate; send the whole conversation, whose beginning is cached"
_INTERNALS = "this server does not return it"
_MEDIA = "this model is served for text only (no vision or audio input)"

COMMON: Mapping[str, Unsupported] = {
    **_all("this server has no LoRA adapters loaded", "lora_path", "lora_id"),
    **_all(
        _INTERNALS, "return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask",
        "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_prompt_token_ids",
        "sampling_logprobs_mode",
    ),
    **_all(_INTERNALS, "routed_experts_start_len", neutral=(0,)),
    **_all(
        _MEDIA, "image_data", "audio_data", "video_data", "mm_hashes", "mm_content_hashes", "use_audio_in_video",
        "images_config", "video_config", "mm_processor_kwargs", "min_dynamic_patch", "max_dynamic_patch",
    ),
    **_all("code of a client is not run", "custom_logit_processor", "custom_params"),
    **_all("output is not watermarked", "watermark"),
    **_all("there is one data-parallel rank, 0", "data_parallel_rank", "routed_dp_rank", neutral=(0,)),
    **_all(
        "prefill and decode run in one server", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank",
    ),
}  # fmt: skip

_BUDGETS = ("thinking_budget", "max_thinking_tokens", "thinking_token_budget")

NATIVE: Mapping[str, Unsupported] = {
    **COMMON,
    **_all("only a chat request has thoughts to limit", *_BUDGETS),
    **_all("use session_params", "session_id"),
    **_all("send text or input_ids", "input_embeds", "positional_embed_overrides"),
    **_all(_MEDIA, "modalities", neutral=(["text"],)),
    **_all(_INTERNALS, "return_entropy", "return_bytes"),
    **_all("requests are logged as --log-requests says", "no_logs"),
    **_all("the call is answered when it has ended, or streamed", "background"),
}

_GRAMMAR = "use response_format, json_schema, regex or ebnf"

OPENAI: Mapping[str, Unsupported] = {
    **COMMON,
    **_all(_SESSIONS, "session_params", "session_id"),
    **_all(
        _INTERNALS, "return_cached_tokens_details", "return_spec_tokens_details", "return_token_ids",
        "return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext", "prompt_logprobs",
    ),
    **_all(_GRAMMAR, "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    **_all("use no_stop_trim", "include_stop_str_in_output"),
    **_all("use logit_bias", "bad_words", "allowed_token_ids"),
    **_all("beam search is not supported", "use_beam_search"),
    **_all("start the server with --allow-auto-truncate", "truncate_prompt_tokens"),
}  # fmt: skip

COMPLETIONS: Mapping[str, Unsupported] = {
    **OPENAI,
    **_all("only a chat request has thoughts to limit", *_BUDGETS),
}

CHAT: Mapping[str, Unsupported] = {
    **OPENAI,
    **_all("use tools and tool_choice", "functions"),
    **_all("use tools and tool_choice", "function_call", neutral=("none", "auto")),
    **_all("output is text only", "audio"),
    **_all("output is text only", "modalities", neutral=(["text"],)),
    **_all("this server does not search the web", "web_search_options"),
    **_all("ask for it in a message", "verbosity", neutral=("medium",)),
    **_all("use chat_template_kwargs", "thinking", "task"),
}

MESSAGES: Mapping[str, Unsupported] = {
    **_all("tools run at the client", "mcp_servers", "container"),
    **_all("send the messages that the model shall read", "context_management"),
}

RESPONSES: Mapping[str, Unsupported] = {
    **_all("send the items, or previous_response_id", "conversation"),
    **_all("send the text itself", "prompt"),
    **_all("send the items that the model shall read", "context_management"),
    **_all("content is not moderated", "moderation"),
    **_all(_INTERNALS, "top_logprobs", neutral=(0,)),
}

EMBEDDINGS: Mapping[str, Unsupported] = {
    **COMMON,
    **_all("a decoder's embedding is the hidden state of its last token", "pooling_type", neutral=("last",)),
    **_all("embeddings have length 1", "normalize", neutral=(True,)),
    **_all("start the server with --allow-auto-truncate", "truncate_prompt_tokens"),
    **_all(_INTERNALS, "return_pooled_hidden_states"),
}

OLLAMA: Mapping[str, Unsupported] = {
    **_all(_MEDIA, "images", "image"),
    **_all("suffix (fill in the middle) is not there", "suffix"),
    **_all("the template is --chat-template's", "template"),
    **_all("send the conversation to /api/chat, whose beginning is cached", "context"),
    **_all(_INTERNALS, "logprobs", "top_logprobs", neutral=(0,)),
}

OLLAMA_OPTIONS: Mapping[str, Unsupported] = {
    **_all("use temperature, top_p, top_k and min_p", "tfs_z", "typical_p", neutral=(1, 1.0)),
    **_all("use temperature, top_p, top_k and min_p", "mirostat", neutral=(0,)),
    **_all("penalties count all tokens", "repeat_last_n", neutral=(-1,)),
    **_all("penalties count all tokens", "penalize_newline", neutral=(True,)),
}

PROFILE: Mapping[str, Unsupported] = {
    **_all("the trace runs until /stop_profile", "num_steps", "start_step", "profile_by_stage", "profile_stages"),
    **_all("set SGLANG_TORCH_PROFILER_DIR when starting the server", "output_dir", "profile_prefix"),
    **_all("each rank writes its own trace", "merge_profiles"),
}


def refuse_unsupported(raw: bytes, table: Mapping[str, Unsupported]) -> None:
    """Raises ApiError 400 for the first field of the JSON object `raw` that is in `table` and asks for something."""
    values = _decoder(tuple(table)).decode(raw)
    for name, field in table.items():
        text = bytes(getattr(values, name))
        if text != _ABSENT and not _is_neutral(text, field):
            raise bad_request(f"{name} is not supported: {field.reason}.", param=name)


_ABSENT = b"null"


@functools.cache
def _decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Reads the values of these fields as they are written and skips all others."""
    fields = [(name, msgspec.Raw, msgspec.Raw(_ABSENT)) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("UnsupportedFields", fields))


def _is_neutral(text: bytes, field: Unsupported) -> bool:
    if len(text) > _MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(text)
    return _is_empty(value) or any(value == neutral and type(value) is type(neutral) for neutral in field.neutral)


def _is_empty(value: Any) -> bool:
    """null, false, "", and lists of nothing else, one value a prompt."""
    if isinstance(value, list):
        return all(_is_empty(entry) for entry in value)
    return value is None or value is False or value == "" or value == {}
