"""The steps of a server whose times are predicted. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` requests. Decoding: one new token each, `context` tokens including it. A prompt: `new` tokens each.
    `verifies`: the `new` tokens are the last one and draft tokens, and all of them have logits."""

    batch: int
    new: int
    context: int
    verifies: bool = False

    @property
    def tokens(self) -> int:
        """Returns the new tokens of all requests."""
        return self.batch * self.new

    @property
    def decodes(self) -> bool:
        """Returns whether each request brings one token."""
        return self.new == 1

    def __str__(self) -> str:
        if self.decodes:
            return f"decode {self.batch} at {self.context} tokens"
        if self.verifies:
            return f"verify {self.new} tokens of each of {self.batch} at {self.context} tokens"
        return f"prefill of {self.tokens} tokens"


def decode_step(batch: int, context: int = 2048) -> Step:
    """Returns a step of `batch` requests that decode, each with `context` cached tokens."""
    return Step(batch, 1, context)


def verify_step(batch: int, width: int, context: int = 2048) -> Step:
    """Returns a step that verifies: each request brings `width` tokens."""
    return Step(batch, width, context, verifies=width > 1)


def prefill_step(tokens: int) -> Step:
    """Returns a step with one prompt and no cached tokens."""
    return Step(1, tokens, tokens)
