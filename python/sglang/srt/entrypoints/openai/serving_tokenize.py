"""`POST /tokenize`: token ids of texts, or of a rendered conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.chat_call import rendered_prompt
from sglang.srt.entrypoints.openai.media_parts import media_of
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, TokenizeRequest
from sglang.srt.entrypoints.openai.serving import OpenAIService, off_event_loop

MAX_TOKENIZE_CHARS = 1 << 21


async def tokenize(service: OpenAIService, body: TokenizeRequest, num_bytes: int) -> dict[str, Any]:
    """Returns the fields of the answer; lists for a list of texts. Raises ApiError 400."""
    tokenizer = service.tokenizer
    single = not isinstance(body.prompt, list)
    chat = body.chat()
    if chat is not None:
        sequences = [await _conversation(service, chat, num_bytes, bool(body.add_special_tokens))]
    else:
        sequences = await _texts(service, body.prompt or "", body.add_special_tokens is not False)
    counts = [len(ids) for ids in sequences]
    answer: dict[str, Any] = {
        "tokens": sequences[0] if single else sequences,
        "count": counts[0] if single else counts,
        "max_model_len": service.manager.model_config.context_len,
    }
    if body.return_token_strs:

        def texts_of() -> list[list[str]]:
            return [list(map(tokenizer.token_text, ids)) for ids in sequences]

        texts = await service.manager.text.in_thread(sum(counts), texts_of)
        answer["token_strs"] = texts[0] if single else texts
    return answer


async def _texts(service: OpenAIService, given: str | list[str], special: bool) -> list[list[int]]:
    prompts = [given] if isinstance(given, str) else given
    _refuse_long(sum(map(len, prompts)), "prompt")
    tokens = []
    for prompt in prompts:
        tokens.append(await service.manager.text.encode(prompt, special))
        await asyncio.sleep(0)  # many short texts must not block the event loop either
    return tokens


async def _conversation(
    service: OpenAIService, chat: ChatCompletionRequest, num_bytes: int, special: bool
) -> list[int]:
    """Returns the ids of the rendered conversation, with all placeholders of its images."""
    media = await off_event_loop(service, num_bytes, media_of, chat.messages)
    service.manager.preparer.require_media(media)
    text = await rendered_prompt(service, chat, num_bytes)
    _refuse_long(len(text), "messages")
    if media:
        return (await service.manager.ids_with_media(text, media)).tolist()
    return await service.manager.text.encode(text, special)


def _refuse_long(num_chars: int, field: str) -> None:
    if num_chars > MAX_TOKENIZE_CHARS:
        raise ApiError(400, f"at most {MAX_TOKENIZE_CHARS} characters are tokenized at once", param=field)
