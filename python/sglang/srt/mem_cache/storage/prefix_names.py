"""Names of a prefix's entries: hashes of everything that their content depends on.

A chain begins with a hash of the server's fingerprint (`fingerprint`) and the namespace; each block's hash is made from
the previous one and the block's tokens.
"""

from __future__ import annotations

import hashlib

from sglang.srt.mem_cache.radix_node import Keys

MIN_BLOCK = 64


def block_tokens(page_size: int) -> int:
    """Returns the tokens of an entry: a multiple of the page size."""
    return -(-MIN_BLOCK // page_size) * page_size


class PrefixNames:
    """Names of one sequence's entries, hashed on demand."""

    def __init__(self, fingerprint: bytes, keys: Keys, namespace: str | None, block: int) -> None:
        """keys [N] int64; block: tokens of an entry."""
        self._keys, self._block = keys.astype("<i8"), block
        space = b"no namespace" if namespace is None else b"namespace " + namespace.encode("utf-8", "surrogatepass")
        self._chain = [hashlib.sha256(fingerprint + hashlib.sha256(space).digest()).digest()]

    def block(self, index: int) -> str:
        """Returns the name of the block of tokens index * block .. (index + 1) * block - 1."""
        return "b" + self._before(index + 1).hex()

    def end(self, depth: int) -> str:
        """Returns the name of the entry at the end of the first `depth` tokens: the tokens after the last whole block,
        windows, and the state."""
        index = depth // self._block
        rest = self._keys[index * self._block : depth].tobytes()
        return "e" + hashlib.sha256(self._before(index) + b"end" + rest).hexdigest()

    def _before(self, index: int) -> bytes:
        """Returns the hash of the first `index` blocks."""
        while len(self._chain) <= index:
            start = (len(self._chain) - 1) * self._block
            tokens = self._keys[start : start + self._block]
            assert len(tokens) == self._block, "a block beyond the end of the sequence"
            self._chain.append(hashlib.sha256(self._chain[-1] + b"block" + tokens.tobytes()).digest())
        return self._chain[index]
