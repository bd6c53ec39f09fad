"""Log probabilities in the two forms of the OpenAI API, as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain
from typing import Any, Protocol

from sglang.srt.sampling.output_logprobs import LogprobBlock, OutputLogprobs
from sglang.srt.utils.json_list import JSONList, Pieces


class TokenTexts(Protocol):
    """The methods of a tokenizer that name single tokens."""

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""


def _entry(tokens: TokenTexts, token: tuple[float | None, int]) -> dict[str, Any]:
    logprob, token_id = token
    return {
        "token": tokens.token_text(token_id),
        "bytes": list(tokens.token_bytes(token_id)),
        "logprob": logprob,
    }


def chat_logprobs(tokens: TokenTexts, logprobs: OutputLogprobs) -> Pieces:
    """Returns `{"content": [{token, bytes, logprob, top_logprobs}]}` as JSON, one entry a token."""
    content = JSONList()
    for block in logprobs.output_blocks():
        tops = block.top or [[] for _ in block.tokens]
        content.extend(
            [
                {**_entry(tokens, token), "top_logprobs": [_entry(tokens, candidate) for candidate in top or ()]}
                for token, top in zip(block.tokens, tops, strict=True)
            ]
        )
    return [b'{"content":[', *content.pieces, b"]}"]


class CompletionLogprobs:
    """Writes `{tokens, token_logprobs, top_logprobs, text_offset}` of one choice as JSON, in the parts of its stream.

    Offsets count characters of the tokens' own texts from the start of the choice.
    """

    def __init__(self, tokens: TokenTexts) -> None:
        self._tokens = tokens
        self._offset = 0

    def output(self, logprobs: OutputLogprobs) -> Pieces:
        """Returns the `logprobs` object of new tokens."""
        return self._object(logprobs.output_blocks())

    def prompt_and_output(self, logprobs: OutputLogprobs) -> Pieces:
        """Returns log probabilities of the prompt's tokens and then of the output's (`echo`); the first token has
        none."""
        return self._object(chain(logprobs.input_blocks(), logprobs.output_blocks()))

    def _object(self, blocks: Iterable[LogprobBlock]) -> Pieces:
        texts, values, tops, offsets = (JSONList() for _ in range(4))
        text = self._tokens.token_text
        for block in blocks:
            new_texts = [text(token) for _, token in block.tokens]
            texts.extend(new_texts)
            values.extend([value for value, _ in block.tokens])
            tops.extend(
                [
                    {text(token): value for value, token in top} if top else None
                    for top in block.top or [None] * len(new_texts)
                ]
            )
            starts = list(accumulate(map(len, new_texts), initial=self._offset))
            self._offset = starts.pop()
            offsets.extend(starts)
        fields = (b'{"tokens":[', texts), (b'],"token_logprobs":[', values), (b'],"top_logprobs":[', tops)
        pieces = [piece for name, part in (*fields, (b'],"text_offset":[', offsets)) for piece in (name, *part.pieces)]
        return [*pieces, b"]}"]
