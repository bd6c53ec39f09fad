"""Converts a caller's GenerateRequest to sequences for the scheduler: splits, checks and tokenizes."""

from __future__ import annotations

import asyncio
import json
import reprlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.front.adapters import ServedAdapters
from sglang.srt.managers.front.checked_ids import checked_ids
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError, TextPair
from sglang.srt.managers.front.media.media_loader import MediaLoader
from sglang.srt.managers.front.media.media_source import MediaSource
from sglang.srt.managers.front.result_limits import ResultLimits
from sglang.srt.managers.front.session_affinity import session_id
from sglang.srt.managers.wire.io_struct import MediaItem, TokenizedGenerateReq
from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.sampling.hidden_states import VALUE_BYTES
from sglang.srt.sampling.sampling_params import SamplingParams, merge
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")

MAX_BATCH = 4096
MAX_SEQUENCES = 16_384
"""Sequences of one call: its prompts times n samples."""
MAX_CALL_TOKENS = 1 << 24
"""Prompt tokens of one call, counted for every sample."""
MAX_CALL_PARAMETER_BYTES = 1 << 28
"""Memory of one call's parameters in another process, which holds them once for every sample."""
MAX_CALL_PATTERN_CHARS = 1 << 16
"""Characters of the `stop_regex` of all prompts of a call: each takes microseconds to check here, and to compile in two
processes that serve all clients."""
MAX_RID_LENGTH = 256
MAX_CACHE_KEY = 1024
MAX_KEPT_S = 86_400.0
"""Most seconds for which a prompt may stay cached before others."""
MAX_PRIORITY = 1 << 31
LONG_TEXT_CHARS_PER_TOKEN = 8
MAX_UNCHECKED_CHARS = 1 << 22
"""A longer text is tokenized in pieces first, so that one that cannot fit does not cost a gigabyte of tokens."""
PIECE_CHARS = 1 << 18
PIECE_SLACK = 64
"""Tokens that each cut of a text into pieces may add."""
YIELD_CHARS = 16_384
"""Characters that are tokenized before the event loop gets to run other callbacks."""
SEQUENCE_CHARS, BYTES_A_CHAR = 256, 8
"""Characters that count for a sequence by itself, and bytes of its parameters that count as one character."""
CHARS_PER_TOKEN_BOUND = 512
"""A text with more characters per token of context than this is refused before it is tokenized: no vocabulary has
tokens that long, so it cannot fit."""

Encode = Callable[[str, bool], Awaitable[list[int]]]
EncodePair = Callable[[TextPair], Awaitable[tuple[list[int], int]]]
Prompt = str | list[int] | Ids
"""A text, or token ids; those in an array have been checked before."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that is ready to send. `requests` holds num_samples sequences for each prompt, prompt by prompt."""

    rids: list[str]
    """Public request ids, one a prompt."""
    requests: list[TokenizedGenerateReq]
    prompt_texts: list[str | None]
    num_samples: int
    media: list[MediaItem] = field(default_factory=list)
    """Images and videos of all prompts."""
    num_logprobs: int = 0
    """Log probabilities for which it needs room before it is sent."""


class RequestPreparer:
    """Validates requests against one model's limits. `encode` tokenizes; None without a tokenizer. `media` loads
    images; None if the model reads none."""

    def __init__(
        self,
        args: ServerArgs,
        model_config: ModelConfig,
        encode: Encode | None,
        media: MediaLoader | None = None,
        encode_pair: EncodePair | None = None,
        adapters: ServedAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._media = media
        self._sees = not args.language_model_only
        self._allow_truncate = args.allow_auto_truncate
        self._context_len = model_config.context_len
        self._vocab_size = model_config.vocab_size
        self._encode, self._encode_pair = encode, encode_pair
        self._longest = model_config.context_len - (not args.is_embedding)
        """Tokens of the longest prompt: embeddings need no room for output."""
        self._only_embeds = args.is_embedding
        of_embeddings = model_config.labels is None
        self._instead = (
            "use /v1/embeddings or /v1/rerank" if of_embeddings else "use /classify, /v1/score or /v1/rerank"
        )
        self._state_bytes = model_config.hidden_size * VALUE_BYTES if args.enable_return_hidden_states else None
        self._default_priority = args.default_priority_value
        self._refuse_priorities = args.abort_on_priority_when_disabled and not args.enable_priority_scheduling
        self._model_defaults = model_config.default_sampling if args.sampling_defaults == "model" else {}
        self._server_defaults = json.loads(args.preferred_sampling_params or "{}")

    def require_generation(self) -> None:
        """Raises RequestError if the server generates no text."""
        if self._only_embeds:
            raise RequestError(f"The server was started with --is-embedding and generates no text; {self._instead}.")

    async def prepare(self, req: GenerateRequest) -> PreparedCall:
        """Checks and tokenizes a request. The media items of all its sequences are held once, until `release`. Raises
        RequestError (400)."""
        placed_items: list[MediaItem] = []
        try:
            return await self._prepare(req, placed_items)
        except BaseException:
            self._release(placed_items)
            raise

    def release(self, call: PreparedCall) -> None:
        """Releases what `prepare` held."""
        self._release(call.media)

    def _release(self, items: list[MediaItem]) -> None:
        if items and self._media is not None:
            self._media.files.release(items)

    async def _prepare(self, req: GenerateRequest, placed_items: list[MediaItem]) -> PreparedCall:
        if not req.embed:
            self.require_generation()
        prompts = _prompts(req)
        count = len(prompts)
        media = self._media_of(req, count)
        rids = _rids(req.rid, count, req.is_batch)
        given = SamplingParams(max_new_tokens=0) if req.embed else req.sampling_params
        params = await self._sampling_params(given, count)
        num_samples = params[0][0].n
        if any(p.n != num_samples for p, _ in params):
            raise RequestError("n must be the same for all prompts of a batch.")
        if count * num_samples > MAX_SEQUENCES:
            raise RequestError(
                f"A call may have at most {MAX_SEQUENCES} sequences, but {count} prompts with n={num_samples} make "
                f"{count * num_samples}; send several calls."
            )
        _bound_parameters(num_samples * sum(p.num_bytes for p, _ in params))
        priority = self._priority(req.priority)
        options = zip(
            _one_per_prompt("return_logprob", req.return_logprob, count, bool),
            _one_per_prompt("logprob_start_len", req.logprob_start_len, count, int),
            _one_per_prompt("top_logprobs_num", req.top_logprobs_num, count, int),
            _spread_ids(req.token_ids_logprob, count),
            _spread_keys("cache_salt", req.cache_salt, count),
            _spread_keys("extra_key", req.extra_key, count),
            self._adapters_of(req.lora_path, count),
            _one_per_prompt("return_hidden_states", req.return_hidden_states, count, bool),
            strict=True,
        )
        requests: list[TokenizedGenerateReq] = []
        received = time.time()
        num_tokens = num_chars = 0
        repeats = req.stream and req.repeats_output
        results = ResultLimits(self._context_len, self._vocab_size, self._state_bytes, repeats)
        for prompt, sources, rid, (p, explicit_length), wanted in zip(
            prompts, media, rids, params, options, strict=True
        ):
            segment_start = 0
            if isinstance(prompt, TextPair):
                num_chars += sum(map(len, prompt))
                prompt, segment_start = await self._pair_ids(prompt)
            num_chars += len(prompt) + num_samples * (SEQUENCE_CHARS + p.num_bytes // BYTES_A_CHAR)
            num_chars += num_samples * len(wanted[3] or ())
            if num_chars >= YIELD_CHARS:
                num_chars = 0
                await asyncio.sleep(0)
            input_ids, items = await self.placed(prompt, sources, req.add_special_tokens, req.media_items)
            placed_items += items
            p = self._fit(input_ids, p, explicit_length and not req.cuts_length)
            num_tokens += (len(input_ids) + len(wanted[3] or ())) * num_samples
            if num_tokens > MAX_CALL_TOKENS:
                raise RequestError(
                    f"The prompts of a call and its token_ids_logprob may have at most {MAX_CALL_TOKENS} tokens, "
                    "counted for each of the n samples; send several calls."
                )
            request = TokenizedGenerateReq(
                rid=rid,
                input_ids=input_ids,
                sampling_params=p,
                stream=req.stream,
                return_logprob=wanted[0],
                logprob_start_len=wanted[1],
                top_logprobs_num=wanted[2],
                token_ids_logprob=wanted[3],
                hidden_start=len(input_ids) - 1 if req.embed else 0 if wanted[7] else -1,
                segment_start=segment_start,
                priority=priority,
                thinking=self._thinking(req, len(input_ids), p.max_new_tokens),
                cache_namespace=_namespace(wanted[4], wanted[5], wanted[6]),
                adapter=wanted[6],
                received=received,
                keep_s=min(req.keep_s, MAX_KEPT_S),
                media=items,
                session=session_id.get(),
            )
            results.add(request, num_samples, explicit_length, bool(wanted[7]))
            requests.extend(_samples(request))
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return PreparedCall(rids, requests, texts, num_samples, placed_items, results.num_reserved)

    def _adapters_of(self, names: Any, count: int) -> list[str | None]:
        """Returns the id of each prompt's LoRA adapter. Raises RequestError, 404 for unknown names."""
        wanted = _spread_keys("lora_path", names, count)
        if any(wanted) and self._adapters is None:
            raise RequestError("lora_path is not supported: this server takes no LoRA adapters (--enable-lora).")
        adapters = self._adapters
        return [None if adapters is None or name is None else adapters.require(name).id for name in wanted]

    def _priority(self, given: int | None) -> int:
        if given is not None and self._refuse_priorities:
            raise RequestError("This server serves no priorities: start it with --enable-priority-scheduling.")
        priority = self._default_priority if given is None else given
        if not -MAX_PRIORITY <= priority < MAX_PRIORITY:
            raise RequestError("priority must be a 32-bit integer.")
        return priority

    async def _sampling_params(self, given: Any, count: int) -> list[tuple[SamplingParams, bool]]:
        """Returns the checked parameters of each prompt, and whether the request gave max_new_tokens. Lets other
        callbacks run in between, because checking the patterns of one prompt takes milliseconds."""
        if isinstance(given, list) and len(given) != count:
            raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts.")
        try:
            if not isinstance(given, list):
                return [self._merge(given)] * count
            merged, num_chars = [], 0
            for entry in given:
                merged.append(self._merge(entry))
                num_chars += sum(map(len, merged[-1][0].stop_regex))
                if num_chars > MAX_CALL_PATTERN_CHARS:
                    raise RequestError(
                        f"The stop_regex of all prompts of a call may have {MAX_CALL_PATTERN_CHARS} characters in all; "
                        "give one for all prompts, or send several calls."
                    )
                await asyncio.sleep(0)
            return merged
        except ValueError as error:
            raise RequestError(str(error)) from None

    def _merge(self, given: Any) -> tuple[SamplingParams, bool]:
        explicit = True
        if isinstance(given, SamplingParams):
            params = given
        elif given is None or isinstance(given, Mapping):
            params = merge(given or {}, self._model_defaults, self._server_defaults)
            explicit = given is not None and given.get("max_new_tokens") is not None
        else:
            raise ValueError(f"sampling_params must be an object, got {type(given).__name__}.")
        params.verify(self._vocab_size)
        if self._encode is None and (params.stop or params.stop_regex):
            raise ValueError("stop and stop_regex need a tokenizer; the server runs with --skip-tokenizer-init.")
        return params, explicit

    async def prompt_ids(self, req: GenerateRequest, add_special_tokens: bool) -> tuple[Ids, list[MediaItem]]:
        """Returns the token ids of a request with a single prompt, and its images, which the caller must release.
        Raises RequestError."""
        (prompt,) = _prompts(req)
        (media,) = self._media_of(req, 1)
        return await self.placed(prompt, media, add_special_tokens)

    def _media_of(self, req: GenerateRequest, count: int) -> list[list[MediaSource]]:
        """Returns the images and videos of each prompt. Raises RequestError if the model reads none."""
        if req.media is None:
            return [[]] * count
        if len(req.media) != count:
            raise RequestError(f"image_data or video_data has {len(req.media)} entries for {count} prompts.")
        self.require_media([source for sources in req.media for source in sources])
        return req.media

    def require_media(self, media: Sequence[MediaSource]) -> None:
        """Raises RequestError for images or videos if the model does not read them."""
        if not media or self._media is not None:
            return
        why = "this model is served for text only (no vision or audio input)"
        if not self._sees:
            why = "the server was started with --language-model-only"
        raise RequestError(f"{media[0].kind}s are not supported: {why}")

    async def placed(
        self,
        prompt: Prompt,
        media: Sequence[MediaSource],
        add_special_tokens: bool = False,
        items: Sequence[MediaItem] = (),
    ) -> tuple[Ids, list[MediaItem]]:
        """Returns the token ids of a prompt with its images and videos, and their items, which the caller must release.
        `items`: those whose placeholders are in the ids already. In a prompt without images a placeholder is an
        ordinary token. Raises RequestError."""
        only_tokens = not media and not isinstance(prompt, str)
        if self._media is not None and isinstance(prompt, str):
            prompt, media = self._media.tokens.with_placeholders(prompt, media)
        ids = await self.input_ids(prompt, add_special_tokens)
        if self._media is None or (only_tokens and not items):
            return ids, []
        if items:
            self._media.files.hold(items)
            return ids, list(items)
        ids, placed = await self._media.place(ids, media)
        try:
            return await self._whole(ids, bool(placed)), placed
        except BaseException:
            self._media.files.release(placed)
            raise

    async def _whole(self, ids: Ids, has_media: bool) -> Ids:
        """Checks the length again and truncates; a cut must not split an image."""
        if has_media and len(ids) > self._longest:
            raise RequestError(
                f"The prompt of {len(ids)} tokens, images included, is longer than the model's context length of "
                f"{self._context_len} tokens; send fewer or smaller images."
            )
        return await self.input_ids(ids)

    async def input_ids(self, prompt: Prompt, add_special_tokens: bool = False) -> Ids:
        """Returns the checked token ids of a prompt, at most as many as fit the context. Raises RequestError."""
        if isinstance(prompt, str):
            if self._encode is None:
                raise RequestError("The server runs with --skip-tokenizer-init: send input_ids instead of text.")
            if len(prompt) > self._context_len * CHARS_PER_TOKEN_BOUND and not self._allow_truncate:
                raise RequestError(
                    f"The prompt of {len(prompt)} characters is longer than the model's context length of "
                    f"{self._context_len} tokens."
                )
            if len(prompt) > min(self._context_len * LONG_TEXT_CHARS_PER_TOKEN, MAX_UNCHECKED_CHARS):
                prompt = await self._bounded(self._encode, prompt)
            prompt = await self._encode(prompt, add_special_tokens)
            if add_special_tokens:
                prompt = await self._cut(prompt)
            source = "The tokenized text"
        else:
            source = "input_ids"
        if not len(prompt):
            raise RequestError("The prompt is empty: at least one token is needed.")
        if len(prompt) > self._longest and not self._allow_truncate:
            room = "" if self._only_embeds else " with room for output"
            raise RequestError(
                f"The prompt of {len(prompt)} tokens{room} is longer than the model's context length of"
                f" {self._context_len} tokens."
            )
        return await checked_ids(prompt[: self._longest], self._vocab_size, source)

    async def _pair_ids(self, pair: TextPair) -> tuple[list[int], int]:
        """Returns the token ids of a pair of texts, and the first of the second one. Raises RequestError."""
        if self._encode is None or self._encode_pair is None:
            raise RequestError("The server runs with --skip-tokenizer-init: pairs of texts cannot be joined.")
        for text in pair:
            if len(text) > self._context_len * CHARS_PER_TOKEN_BOUND:
                raise RequestError(
                    f"The text of {len(text)} characters is longer than the model's context length of"
                    f" {self._context_len} tokens."
                )
        ids, segment_start = await self._encode_pair(pair)
        return await self._cut(ids), segment_start

    async def _cut(self, ids: list[int]) -> list[int]:
        """Returns the ids of a text to be embedded, cut to the longest that the model takes where the server cuts
        texts: what its tokenizer puts behind every text stays there. Other ids are returned as they are."""
        if not (self._only_embeds and self._allow_truncate and self._encode and len(ids) > self._longest):
            return ids
        around = await self._encode("", True)
        kept = 0
        while kept < len(around) and around[-1 - kept] == ids[-1 - kept]:
            kept += 1
        return ids[: self._longest - kept] + ids[len(ids) - kept :] if kept < self._longest else ids

    async def _bounded(self, encode: Encode, text: str) -> str:
        """Returns `text`, truncated (if the server truncates) to what the context may hold. Raises RequestError for
        more tokens."""
        num_chars = num_tokens = 0
        for piece in pieces(text):
            num_chars += len(piece)
            num_tokens += len(await encode(piece, False)) - PIECE_SLACK
            if num_tokens > self._context_len:
                if self._allow_truncate:
                    return text[:num_chars]
                raise RequestError(
                    f"The prompt of {len(text)} characters is longer than the model's context length of "
                    f"{self._context_len} tokens."
                )
        return text

    def _fit(self, ids: Ids, params: SamplingParams, refuses: bool) -> SamplingParams:
        """Returns the parameters with an output length that fits the context after the prompt. With `refuses`, raises
        RequestError instead of shortening."""
        room = self._context_len - len(ids)
        wanted = params.max_new_tokens
        if wanted is None or wanted <= room:
            return params
        if refuses and not self._allow_truncate:
            raise RequestError(
                f"The prompt of {len(ids)} tokens with max_new_tokens of {wanted} is longer than the model's context "
                f"length of {self._context_len} tokens. "
                + (f"Ask for at most {room} tokens." if room > 0 else "Shorten the prompt.")
            )
        return msgspec.structs.replace(params, max_new_tokens=room, min_new_tokens=min(room, params.min_new_tokens))

    def _thinking(self, req: GenerateRequest, num_tokens: int, max_new_tokens: int | None) -> ThinkingBudget | None:
        """Returns the thinking budget for a prompt of `num_tokens`."""
        if req.thinking is None or req.thinking_share == 1:
            return req.thinking
        room = self._context_len - num_tokens
        longest = room if max_new_tokens is None else min(room, max_new_tokens)
        share = int(longest * req.thinking_share)
        return msgspec.structs.replace(req.thinking, tokens=min(req.thinking.tokens, share))


def pieces(text: str) -> Iterator[str]:
    """Cuts a text into pieces that are tokenized one by one, so that other requests need not wait for all of it."""
    return (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))


def _prompts(req: GenerateRequest) -> Sequence[Prompt]:
    if (req.text is None) == (req.input_ids is None):
        raise RequestError("Give either text or input_ids, and not both.")
    given: Any = req.text if req.text is not None else req.input_ids
    prompts: Any = given if req.is_batch else [given]
    kind = (str, TextPair) if req.text is not None else (list, np.ndarray)
    if isinstance(prompts, list) and not 1 <= len(prompts) <= MAX_BATCH:
        raise RequestError(f"A batch must have 1 to {MAX_BATCH} prompts, got {len(prompts)}.")
    if not isinstance(prompts, list) or not all(isinstance(prompt, kind) for prompt in prompts):
        raise RequestError(
            "text must be a string or a list of strings, input_ids a list of ids or a list of such lists."
        )
    return prompts


def _rids(given: Any, count: int, is_batch: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str) and not (is_batch and count > 1):
        given = [given]
    elif isinstance(given, str):
        given = [f"{given}_{i}" for i in range(count)]
    if not isinstance(given, list) or len(given) != count:
        raise RequestError(f"rid must be a string or a list with one string for each of the {count} prompts.")
    for rid in given:
        if not isinstance(rid, str) or not 1 <= len(rid) <= MAX_RID_LENGTH:
            raise RequestError(f"rid must be a string of 1 to {MAX_RID_LENGTH} characters.")
    if len(set(given)) != count:
        raise RequestError("rid must be different for each prompt of a batch.")
    return given


def _bound_parameters(num_bytes: int) -> None:
    if num_bytes > MAX_CALL_PARAMETER_BYTES:
        raise RequestError(
            f"Grammars, stop strings, stop_token_ids and logit_bias of a call may take {MAX_CALL_PARAMETER_BYTES} "
            f"bytes, counted for each prompt and sample, but these take {num_bytes}; send several calls."
        )


def _one_per_prompt(name: str, value: Any, count: int, kind: type[T]) -> list[T]:
    """Returns one value for each prompt, from one value for all or a list."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts.")
    if any(type(entry) is not kind for entry in values):
        raise RequestError(f"{name} must be of type {kind.__name__}, got {reprlib.repr(value)}.")
    return values


def _spread_ids(value: Any, count: int) -> list[list[int] | None]:
    """Returns the ids for each prompt, not checked yet: they may be many."""
    if value is None:
        return [None] * count
    if isinstance(value, list) and (not value or type(value[0]) is int):
        return [value] * count
    return list(_one_per_prompt("token_ids_logprob", value, count, list))


def _spread_keys(name: str, value: Any, count: int) -> list[str | None]:
    """Returns the cache names of each prompt; an empty name counts as None."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts.")
    for entry in values:
        if entry is not None and not (isinstance(entry, str) and len(entry) <= MAX_CACHE_KEY):
            raise RequestError(f"{name} must be a string of at most {MAX_CACHE_KEY} characters.")
    return [entry or None for entry in values]


def _namespace(cache_salt: str | None, extra_key: str | None, adapter: str | None = None) -> str | None:
    """Combines the names into one, which differs for different ones."""
    if adapter is not None:
        return json.dumps([cache_salt, extra_key, adapter])
    return None if cache_salt is None and extra_key is None else json.dumps([cache_salt, extra_key])


def _samples(request: TokenizedGenerateReq) -> list[TokenizedGenerateReq]:
    """Returns `n` sequences of one prompt. A given seed counts up, or all would be the same."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    seed = params.sampling_seed
    return [
        msgspec.structs.replace(
            request,
            rid=f"{request.rid}_{i}",
            sampling_params=msgspec.structs.replace(
                params, n=1, sampling_seed=None if seed is None else (seed + i + (1 << 63)) % (1 << 64) - (1 << 63)
            ),
        )
        for i in range(params.n)
    ]
