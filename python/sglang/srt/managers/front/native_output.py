"""Outputs as the dicts of `/generate` and `Engine.generate`, with text, output_ids and meta_info. Hidden states in them
are float32 arrays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np

from sglang.srt.managers.front.draft_details import draft_meta_info
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.wire.io_struct import DEFAULT_VERSION, FinishReason, TokenMeta
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.sampling.thoughts import Thoughts

FEW_LOGPROBS = 1 << 12
"""Log probabilities of which dicts are made, and then JSON, in two milliseconds."""
LOGPROB_FIELDS = [f"{part}_{name}logprobs" for part in ("output", "input") for name in ("token_", "top_", "token_ids_")]
"""Fields of `meta_info`, in their order."""
"""Value for the weights that the server was started with."""


async def native_results(manager: TokenizerManager, req: GenerateRequest) -> dict[str, Any] | list[dict[str, Any]]:
    """Returns the complete results: one dict, or a list in prompt order (samples of a prompt adjacent) for a batch or n
    > 1. Raises RequestError."""
    async with await manager.submit(req) as stream:
        outputs = await stream.collect()
    writer = ResultWriter(manager, req, stream)
    results = [await _result(writer, output, output.text, output.new_ids, output.logprobs) for output in outputs]
    return results if is_list(stream) else results[0]


async def native_stream(
    manager: TokenizerManager, req: GenerateRequest, incremental: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields a dict for every step of every sequence, with everything so far or, if `incremental`, only what is new.
    Dicts of a batch or of n > 1 carry the sequence's `index`. Raises RequestError, before the first dict if nothing was
    sent."""
    async with await manager.submit(req) as stream:
        writer = ResultWriter(manager, req, stream)
        so_far = [_SoFar() for _ in stream.requests]
        many = is_list(stream)
        async for output in stream:
            text, ids, logprobs = output.text, output.new_ids, output.logprobs
            if not incremental:
                text, ids, logprobs = so_far[output.index].add(output)
            result = await _result(writer, output, text, ids, logprobs)
            if many:
                result["index"] = output.index
            yield result


def is_list(stream: GenerationStream) -> bool:
    """Returns whether results come as a list."""
    return stream.is_batch or stream.num_samples > 1


async def _result(
    writer: ResultWriter, output: GenerateOutput, text: str, ids: list[int], logprobs: OutputLogprobs | None
) -> dict[str, Any]:
    """Returns the result that `writer` makes, in a thread if it has many log probabilities."""
    if logprobs is None or logprobs.num_values <= FEW_LOGPROBS:
        return writer.result(output, text, ids, logprobs)
    return await asyncio.to_thread(writer.result, output, text, ids, logprobs)


class _SoFar:
    """The output of one sequence so far."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: OutputLogprobs | None = None

    def add(self, output: GenerateOutput) -> tuple[str, list[int], OutputLogprobs | None]:
        self._text += output.text
        self._ids.extend(output.new_ids)
        if self._logprobs is None:
            self._logprobs = output.logprobs
        elif output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        return self._text, self._ids.copy(), self._logprobs


class ResultWriter:
    """Builds the dicts of one call."""

    def __init__(self, manager: TokenizerManager, req: GenerateRequest, stream: GenerationStream) -> None:
        tokenizer = manager.tokenizer
        self._hidden_size = manager.model_config.hidden_size
        self.has_text = tokenizer is not None
        self._names = tokenizer if req.return_text_in_logprobs else None
        self._stream = stream
        self._thoughts = [_Counter(req.thinking) for _ in stream.requests] if req.counts_thoughts else []

    def result(
        self, output: GenerateOutput, text: str, ids: list[int], logprobs: OutputLogprobs | None
    ) -> dict[str, Any]:
        """Returns the dict of an output with this text, these ids and log probabilities."""
        info = self.info(output)
        if logprobs is not None:
            for name, entries in self.logprob_parts(logprobs):
                info.setdefault(name, []).extend(entries)
        states = self.hidden_states(output)
        if states is not None:
            prompt, outputs = states
            info["hidden_states"] = [prompt, *outputs] if len(prompt) else []
        result = {"output_ids": ids, "meta_info": info}
        return {"text": text, **result} if self.has_text else result

    def info(self, output: GenerateOutput) -> dict[str, Any]:
        """Returns the `meta_info` of an output without log probabilities and hidden states."""
        request = self._stream.requests[output.index]
        if self._thoughts:
            output.meta.reasoning_tokens = self._thoughts[output.index].push(output.new_ids)
        info = request_info(request.rid, output.meta, output.finish)
        if output.finish is not None:
            info["e2e_latency"] = time.monotonic() - self._stream.created_time
        return info

    def logprob_parts(self, logprobs: OutputLogprobs) -> Iterator[tuple[str, list[Any]]]:
        """Yields fields of `meta_info`, each with some of its entries, until all fields have all of theirs."""
        yield "output_token_logprobs", []
        for part, blocks in (("output", logprobs.output_blocks()), ("input", logprobs.input_blocks())):
            for block in blocks:
                yield f"{part}_token_logprobs", self._entries(block.tokens)
                if block.top:
                    yield f"{part}_top_logprobs", self._rows(block.top)
                if block.named:
                    yield f"{part}_token_ids_logprobs", self._rows(block.named)

    def hidden_states(self, output: GenerateOutput) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the hidden states of the prompt [P, H], and of the output tokens except the last [N, H]; None if the
        output has none, which only the last one has."""
        request = self._stream.requests[output.index]
        if request.hidden_start < 0 or output.finish is None:
            return None
        states = np.frombuffer(output.hidden, np.float32).reshape(-1, self._hidden_size)
        prompt_len = len(request.input_ids)
        return states[:prompt_len], states[prompt_len:]

    def _entries(self, tokens: Any) -> list[list[Any]]:
        names = self._names
        return [[logprob, token, None if names is None else names.token_text(token)] for logprob, token in tokens]

    def _rows(self, rows: Any) -> list[list[list[Any]] | None]:
        return [None if row is None else self._entries(row) for row in rows]


class _Counter:
    """Counts the tokens of one output up to the end of its thoughts."""

    def __init__(self, budget: ThinkingBudget | None) -> None:
        self._thoughts = None if budget is None else Thoughts(budget)
        self._count = 0

    def push(self, ids: list[int]) -> int:
        """Returns the count after these tokens. If thoughts begin late or never, the tokens before them count too."""
        for token in ids:
            if self._thoughts is None or self._thoughts.over:
                break
            self._thoughts.push(token)
            self._count += 1
        return self._count


def request_info(rid: str, meta: TokenMeta, finish: FinishReason | None) -> dict[str, Any]:
    """Returns the `meta_info` of a request."""
    info: dict[str, Any] = {
        "id": rid,
        "finish_reason": None if finish is None else finish_dict(finish),
        "prompt_tokens": meta.prompt_tokens,
        "weight_version": DEFAULT_VERSION if meta.weight_versions is None else meta.weight_versions[-1][0],
        "num_retractions": meta.num_retractions,
        "reasoning_tokens": meta.reasoning_tokens,
        "completion_tokens": meta.completion_tokens,
        "cached_tokens": meta.cached_tokens,
    }
    if meta.weight_versions is not None and len(meta.weight_versions) > 1:
        info["weight_versions"] = [{"version": name, "start": start} for name, start in meta.weight_versions]
    if meta.host_tokens is not None:
        info["cached_tokens_details"] = _cached_tokens_details(meta, meta.host_tokens)
    return info if meta.drafts is None else info | draft_meta_info(meta.drafts)


def _cached_tokens_details(meta: TokenMeta, loaded: int) -> dict[str, int]:
    """Counts cached tokens by origin. loaded: those loaded from main memory."""
    details = {"device": meta.cached_tokens - loaded, "host": loaded - (meta.stored_tokens or 0)}
    return details if meta.stored_tokens is None else {**details, "storage": meta.stored_tokens}


def finish_dict(finish: FinishReason) -> dict[str, Any]:
    """Returns `{"type": "stop", "matched": ..}`, `{"type": "length", "length": ..}` or `{"type": "abort", "message":
    ..}`."""
    fields = {"matched": finish.matched, "length": finish.length, "message": finish.message}
    return {"type": finish.type, **{name: value for name, value in fields.items() if value is not None}}
