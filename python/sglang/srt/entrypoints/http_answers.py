"""Schemas of whole JSON answers by route, for `/openapi.json`: the fields that all answers have, and their types."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _record(**fields: Any) -> Schema:
    """Returns the schema of an object with at least these fields; a plain string is a constant."""
    properties = {name: {"const": field} if isinstance(field, str) else field for name, field in fields.items()}
    return {"type": "object", "required": list(fields), "properties": properties}


def _list(entry: Schema) -> Schema:
    return {"type": "array", "items": entry}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_or_many(schema: Schema) -> Schema:
    return {"anyOf": [schema, _list(schema)]}


_USAGE = _record(prompt_tokens=_COUNT, total_tokens=_COUNT)
_CHAT_MESSAGE = _record(role="assistant", content=_or_null(_TEXT))
_CHOICE = {"index": _COUNT, "logprobs": _or_null(_OBJECT), "finish_reason": _TEXT}
_MODEL = _record(
    id=_TEXT, object="model", created=_COUNT, owned_by="sglang", root=_TEXT, max_model_len=_or_null(_COUNT)
)
_META = _record(id=_TEXT, finish_reason=_OBJECT, prompt_tokens=_COUNT, completion_tokens=_COUNT, cached_tokens=_COUNT)
_GENERATED = _record(output_ids=_list(_COUNT), meta_info=_META)
_RESPONSE = _record(
    id=_TEXT,
    object="response",
    created_at=_COUNT,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    model=_TEXT,
    output=_list(_record(type=_TEXT, id=_TEXT)),
    tools=_list(_OBJECT),
    tool_choice={"type": ["string", "object"]},
    parallel_tool_calls=_BOOLEAN,
    usage=_or_null(_record(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT)),
)
_OLLAMA_MODEL = _record(name=_TEXT, model=_TEXT, size=_COUNT, digest=_TEXT, details=_OBJECT)
_OLLAMA_ANSWER = {"model": _TEXT, "created_at": _TEXT, "done": {"const": True}, "done_reason": _TEXT}
_MESSAGE = _record(message=_TEXT, status="ok")
_STORED = "/v1/responses/{response_id}"
_STORE = "/hicache/storage-backend"
_DONE = _record(success=_BOOLEAN, message=_TEXT)

_BY_PATH: dict[str, Schema] = {
    "/v1/chat/completions": _record(
        id=_TEXT,
        object="chat.completion",
        created=_COUNT,
        model=_TEXT,
        choices=_list(_record(message=_CHAT_MESSAGE, **_CHOICE)),
        usage=_USAGE,
    ),
    "/v1/completions": _record(
        id=_TEXT,
        object="text_completion",
        created=_COUNT,
        model=_TEXT,
        choices=_list(_record(text=_TEXT, **_CHOICE)),
        usage=_USAGE,
    ),
    "/v1/models": _record(object="list", data=_list(_MODEL)),
    "/v1/models/{model_id}": _MODEL,
    "/tokenize": _record(
        tokens={"anyOf": [_list(_COUNT), _list(_list(_COUNT))]}, count=_one_or_many(_COUNT), max_model_len=_COUNT
    ),
    "/load_lora_adapter": _record(success=_BOOLEAN, error_message=_TEXT, loaded_adapters=_OBJECT),
    "/load_lora_adapter_from_tensors": _record(success=_BOOLEAN, error_message=_TEXT, loaded_adapters=_OBJECT),
    "/unload_lora_adapter": _record(success=_BOOLEAN, error_message=_TEXT, loaded_adapters=_OBJECT),
    "/detokenize": _record(text=_one_or_many(_TEXT)),
    "/parse_function_call": _record(
        normal_text=_TEXT, calls=_list(_record(tool_index=_COUNT, name=_TEXT, parameters=_TEXT))
    ),
    "/separate_reasoning": _record(reasoning_text=_TEXT, text=_TEXT),
    "/v1/messages": _record(
        id=_TEXT,
        type="message",
        role="assistant",
        model=_TEXT,
        content=_list(_record(type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason={"enum": ["end_turn", "max_tokens", "tool_use", "stop_sequence", "model_context_window_exceeded"]},
        stop_sequence=_or_null(_TEXT),
        usage=_record(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "/v1/messages/count_tokens": _record(input_tokens=_COUNT),
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": _record(object="response.input_tokens", input_tokens=_COUNT),
    _STORED: _RESPONSE,
    _STORED + "/cancel": _RESPONSE,
    _STORED + "/input_items": _record(
        object="list", data=_list(_record(id=_TEXT)), first_id=_TEXT, last_id=_TEXT, has_more=_BOOLEAN
    ),
    "/v1/embeddings": _record(
        object="list",
        model=_TEXT,
        usage=_USAGE,
        data=_list(
            _record(object="embedding", index=_COUNT, embedding={"anyOf": [_list(_NUMBER), _TEXT]}),
        ),
    ),
    "/encode": _one_or_many(_record(embedding=_list(_NUMBER), meta_info=_META)),
    "/classify": {
        "anyOf": [
            _one_or_many(_record(embedding=_list(_NUMBER), meta_info=_META)),
            _record(
                object="list",
                model=_TEXT,
                usage=_USAGE,
                data=_list(_record(index=_COUNT, label=_TEXT, probs=_list(_NUMBER), num_classes=_COUNT)),
            ),
        ]
    },
    "/v1/score": _record(object="scoring", scores=_list(_list(_NUMBER)), model=_TEXT, usage=_USAGE),
    "/v1/rerank": _list(_record(score=_NUMBER, index=_COUNT, document=_or_null(_TEXT), meta_info=_META)),
    "/rerank": _record(
        id=_TEXT, model=_TEXT, usage=_USAGE, results=_list(_record(index=_COUNT, relevance_score=_NUMBER))
    ),
    "/api/chat": _record(message=_record(role="assistant", content=_TEXT), **_OLLAMA_ANSWER),
    "/api/generate": _record(response=_TEXT, **_OLLAMA_ANSWER),
    "/api/embed": _record(model=_TEXT, embeddings=_list(_list(_NUMBER)), prompt_eval_count=_COUNT),
    "/api/embeddings": _record(embedding=_list(_NUMBER)),
    "/api/show": _record(
        modelfile=_TEXT, template=_TEXT, details=_OBJECT, model_info=_OBJECT, capabilities=_list(_TEXT)
    ),
    "/api/tags": _record(models=_list(_OLLAMA_MODEL)),
    "/api/ps": _record(models=_list(_OLLAMA_MODEL)),
    "/api/version": _record(version=_TEXT),
    "/generate": _one_or_many(_GENERATED),
    "/model_info": _record(
        model_path=_TEXT, is_generation=_BOOLEAN, max_model_len=_COUNT, architectures=_list(_TEXT), vocab_size=_COUNT
    ),
    "/server_info": _record(version=_TEXT, status=_TEXT, internal_states=_list(_OBJECT)),
    "/v1/loads": _record(
        timestamp=_NUMBER,
        version=_TEXT,
        dp_rank_count=_COUNT,
        loads=_list(_record(dp_rank=_COUNT, num_running_reqs=_COUNT, num_waiting_reqs=_COUNT, token_usage=_NUMBER)),
        aggregate=_record(total_running_reqs=_COUNT, total_waiting_reqs=_COUNT, total_reqs=_COUNT),
    ),
    "/get_load": _list(_record(dp_rank=_COUNT, num_reqs=_COUNT, num_waiting_reqs=_COUNT, num_tokens=_COUNT)),
    "/sleep": _record(status=_TEXT, level=_COUNT),
    "/wake_up": _record(status={"enum": ["awake", "sleeping"]}, tags=_list(_TEXT)),
    "/is_sleeping": _record(is_sleeping=_BOOLEAN),
    "/update_weights_from_disk": _record(success=_BOOLEAN, message=_TEXT, num_paused_requests=_COUNT),
    "/update_weights_from_tensor": _DONE,
    "/update_weights_from_distributed": _DONE,
    "/init_weights_update_group": _DONE,
    "/destroy_weights_update_group": _DONE,
    "/begin_weight_update": _DONE,
    "/end_weight_update": _DONE,
    "/update_weight_version": _record(success=_BOOLEAN, message=_TEXT, new_version=_TEXT),
    "/get_weights_by_name": _list({"anyOf": [_NUMBER, _list(_NUMBER)]}),
    "/weights_checker": _DONE,
    "/pause_generation": _MESSAGE,
    "/continue_generation": _MESSAGE,
    "/open_session": _TEXT,
    "/add_external_corpus": _record(success=_BOOLEAN, corpus_id=_TEXT, message=_TEXT, loaded_token_count=_COUNT),
    "/remove_external_corpus": _DONE,
    "/list_external_corpora": _record(success=_BOOLEAN, corpus_token_counts=_OBJECT, message=_TEXT),
}
_BY_METHOD: dict[tuple[str, str], Schema] = {
    ("delete", _STORED): _record(id=_TEXT, object="response", deleted={"const": True}),
    ("get", _STORE): _record(
        hicache_storage_backend=_or_null(_TEXT),
        hicache_storage_prefetch_policy=_or_null(_TEXT),
        hicache_write_policy=_or_null(_TEXT),
    ),
    ("put", _STORE): _DONE,
    ("delete", _STORE): _DONE,
}


def answer_schema(method: str, path: str) -> Schema:
    """Returns the schema of the answer with status 200. Raises KeyError for a route whose answer is not described."""
    return _BY_METHOD.get((method, path)) or _BY_PATH[path]
