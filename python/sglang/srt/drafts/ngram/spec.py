"""The memory of drafts that are looked up in earlier tokens."""

from __future__ import annotations

from sglang.srt.configs.speculative import NGRAM
from sglang.srt.server_args import ServerArgs


def ngram_bytes(args: ServerArgs, max_requests: int, context_len: int) -> int:
    """Returns the bytes that NGRAM takes: the tokens of all requests, and external texts with their order, in int32."""
    if args.speculative_algorithm != NGRAM:
        return 0
    return 4 * ((max_requests + 1) * context_len + 2 * args.speculative_ngram_external_corpus_max_tokens)
