"""Log probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from typing import Any, Protocol

from sglang.srt.sampling.output_logprobs import OutputLogprobs, TokenLogprob


class TokenTexts(Protocol):
    """The methods of a tokenizer that name single tokens."""

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""


def _entry(tokens: TokenTexts, token: TokenLogprob) -> dict[str, Any]:
    logprob, token_id = token
    return {
        "token": tokens.token_text(token_id),
        "bytes": list(tokens.token_bytes(token_id)),
        "logprob": logprob,
    }


def chat_logprobs(tokens: TokenTexts, logprobs: OutputLogprobs) -> dict[str, Any]:
    """Returns `{"content": [{token, bytes, logprob, top_logprobs}]}`, one entry a token."""
    tops = logprobs.output_top or [[] for _ in logprobs.output]
    content = [
        {**_entry(tokens, token), "top_logprobs": [_entry(tokens, candidate) for candidate in top]}
        for token, top in zip(logprobs.output, tops, strict=True)
    ]
    return {"content": content}


class CompletionLogprobs:
    """Writes `{tokens, token_logprobs, top_logprobs, text_offset}` of one choice, in the pieces of its stream.

    Offsets count characters of the tokens' own texts from the start of the choice.
    """

    def __init__(self, tokens: TokenTexts) -> None:
        self._tokens = tokens
        self._offset = 0

    def output(self, logprobs: OutputLogprobs) -> dict[str, Any]:
        """Returns the `logprobs` object of new tokens."""
        tops: list[list[TokenLogprob]] = logprobs.output_top or [[] for _ in logprobs.output]
        return self._piece(list(logprobs.output), list(tops))

    def prompt_and_output(self, logprobs: OutputLogprobs) -> dict[str, Any]:
        """Returns log probabilities of the prompt's tokens and then of the output's (`echo`); the first token has
        none."""
        prompt = list(logprobs.input or [])
        prompt_tops = list(logprobs.input_top or [None] * len(prompt))
        tops = logprobs.output_top or [[] for _ in logprobs.output]
        return self._piece(prompt + list(logprobs.output), prompt_tops + list(tops))

    def _piece(self, entries: list[tuple[float | None, int]], tops: list[list[TokenLogprob] | None]) -> dict[str, Any]:
        piece: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for (logprob, token_id), top in zip(entries, tops, strict=True):
            text = self._tokens.token_text(token_id)
            piece["tokens"].append(text)
            piece["token_logprobs"].append(logprob)
            piece["top_logprobs"].append(
                {self._tokens.token_text(candidate): value for value, candidate in top} if top else None
            )
            piece["text_offset"].append(self._offset)
            self._offset += len(text)
        return piece
