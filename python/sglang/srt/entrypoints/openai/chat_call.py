"""Converts a chat request, from any of the APIs, to a call of the engine."""

from __future__ import annotations

import copy
import math

from sglang.srt.constrained.schema_form import check_form
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.adapter_names import adapters_of
from sglang.srt.entrypoints.openai.call_ids import with_ids_of_format
from sglang.srt.entrypoints.openai.chat_output import ChatFormats
from sglang.srt.entrypoints.openai.chat_template import ConversationTooLong
from sglang.srt.entrypoints.openai.media_parts import media_of
from sglang.srt.entrypoints.openai.message_order import fitted_messages
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from sglang.srt.entrypoints.openai.sampling import sampling_dict
from sglang.srt.entrypoints.openai.serving import OpenAIService, off_event_loop
from sglang.srt.function_call.names import check_argument_names, check_function_names, tagged_names
from sglang.srt.managers.front.generate_request import GenerateRequest
from sglang.srt.managers.front.text_encoder import LONG_WORK

MAX_THOUGHTS = 1 << 31
"""More tokens than any context has."""
PROMPT_END_TOKENS = 32
"""Tokens at the end of a prompt that are searched for the beginning of thoughts."""


async def chat_call(
    service: OpenAIService,
    body: ChatCompletionRequest,
    num_bytes: int,
    rid: str | list[str],
    target: int | None = None,
    folds: bool = False,
) -> tuple[GenerateRequest, ChatFormats]:
    """Returns the call, and the formats of its outputs. `num_bytes`: approximate size of the conversation. `target`:
    tokens after which thoughts are ended if the model's format allows it. `folds`: see `_fitted`. Raises ApiError,
    404 for unknown models."""
    service.manager.preparer.require_generation()
    adapters = adapters_of(service, body.model, body.lora_path)
    body = await off_event_loop(service, num_bytes, _fitted, service, folds, body)
    media = await off_event_loop(service, num_bytes, media_of, body.messages)
    service.manager.preparer.require_media(media)
    if body.input_ids is None:
        prompt = await rendered_prompt(service, body, num_bytes)
    else:
        prompt = None
        await off_event_loop(service, num_bytes, check_tools, service.formats.calls_name, body)
    call, formats = await off_event_loop(service, num_bytes, _with_formats, service, rid, prompt, body)
    call.lora_path = adapters
    call.media = [media] if media else None
    _limit_thoughts(service, body, formats, call, target)
    return call, formats


def _with_formats(
    service: OpenAIService, rid: str | list[str], prompt: str | None, body: ChatCompletionRequest
) -> tuple[GenerateRequest, ChatFormats]:
    formats = ChatFormats(service.formats, body, _prompt_end(service, body) if prompt is None else prompt)
    call = _generate_request(body, rid, prompt, formats)
    call.kept_bytes = formats.num_bytes
    return call, formats


def _limit_thoughts(
    service: OpenAIService, body: ChatCompletionRequest, formats: ChatFormats, call: GenerateRequest, target: int | None
) -> None:
    """Limits thoughts as the client asks. Without a limit, thoughts before a constrained answer get a share of the
    output; otherwise a model may think until nothing is left for the answer."""
    wanted = target if body.thinking_budget is None else body.thinking_budget
    share = service.manager.args.constrained_thinking_share
    if wanted is not None:
        call.thinking = formats.thinking_budget(service.tokenizer, wanted)
    elif formats.thinks_first and share < 1:
        call.thinking = formats.thinking_budget(service.tokenizer, MAX_THOUGHTS)
        call.thinking_share = share
    if body.thinking_budget is not None and call.thinking is None:
        raise bad_request(
            "thinking_budget needs --reasoning-parser, and a model whose thoughts end with a mark of their own",
            param="thinking_budget",
        )


def _fitted(service: OpenAIService, folds: bool, body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Returns the request with its messages in an order that the chat template accepts, if the server's flag asks for
    it, or the API is one for agents (`folds`)."""
    place = service.manager.args.fold_system_messages or ("in-place" if folds else None)
    if place is None or body.input_ids is not None:
        return body
    fitted = copy.copy(body)
    rules = service.chat_template.message_rules(body.tools)
    fitted.messages = fitted_messages(body.messages, rules, in_place=place == "in-place")
    return fitted


async def rendered_prompt(service: OpenAIService, body: ChatCompletionRequest, num_bytes: int) -> str:
    """Returns the conversation as rendered by the template."""
    _ = service.tokenizer

    def checked(body: ChatCompletionRequest) -> None:
        check_tools(service.formats.calls_name, body)
        body.messages = with_ids_of_format(body.messages, service.formats)

    await off_event_loop(service, num_bytes, checked, body)
    (prompt,) = await service.chat_template.render([body], num_bytes >= LONG_WORK)
    return prompt


async def count_prompt(
    service: OpenAIService,
    body: ChatCompletionRequest,
    num_bytes: int,
    enough: float = math.inf,
    folds: bool = False,
) -> int:
    """Counts the tokens of the conversation, with images; stops at `enough`. `folds`: see `_fitted`."""
    body = await off_event_loop(service, num_bytes, _fitted, service, folds, body)
    media = await off_event_loop(service, num_bytes, media_of, body.messages)
    service.manager.preparer.require_media(media)
    try:
        prompt = await rendered_prompt(service, body, num_bytes)
    except ConversationTooLong:
        if enough == math.inf:
            raise
        return int(enough) + 1
    if not media:
        return await service.manager.text.count_tokens(prompt, enough)
    return len(await service.manager.ids_with_media(prompt, media))


def check_tools(calls_name: str | None, body: ChatCompletionRequest) -> None:
    """Raises ApiError 400 for parameters that are not a JSON schema, also without a grammar, and for names that calls
    in the format `calls_name` cannot have."""
    for tool in body.tools or ():
        function = tool["function"]
        try:
            check_form(function.get("parameters") or {})
        except ValueError as error:
            name = function["name"][:64]
            raise bad_request(f"the parameters of {name!r} are not a JSON schema: {error}", param="tools") from None
    if calls_name is not None and body.tool_choice != "none":
        try:
            _check_names(calls_name, body)
        except ValueError as error:
            raise bad_request(str(error), param="tools") from None


def _check_names(calls_name: str, body: ChatCompletionRequest) -> None:
    """Checks names. Those of arguments matter only if a grammar contains them: a model that writes freely may have
    other ways."""
    functions = [tool["function"] for tool in body.tools or ()]
    check_function_names(calls_name, (function["name"] for function in functions))
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    bound = (f for f in functions if f.get("strict") or choice == "required" or f["name"] == named)
    check_argument_names(
        calls_name, (name for f in bound for name in tagged_names(calls_name, f.get("parameters") or {}))
    )


def _prompt_end(service: OpenAIService, body: ChatCompletionRequest) -> str:
    tokenizer = service.tokenizer
    ids = (body.input_ids or [])[-PROMPT_END_TOKENS:]
    vocab_size = service.manager.model_config.vocab_size
    if not all(0 <= token < vocab_size for token in ids):
        return ""
    return tokenizer.decode(ids, skip_special_tokens=False)


def _generate_request(
    body: ChatCompletionRequest,
    rid: str | list[str],
    prompt: str | None,
    formats: ChatFormats,
) -> GenerateRequest:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_dict(body, max_tokens)
    formats.constrain(params)
    return GenerateRequest(
        text=prompt,
        input_ids=body.input_ids,
        add_special_tokens=False,
        cuts_length=True,
        sampling_params=params,
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
        rid=rid,
        priority=body.priority,
        keep_s=body.keep_s,
        cache_salt=body.cache_salt,
        extra_key=body.extra_key,
    )
