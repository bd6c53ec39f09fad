"""Decisions that only one rank can take, because a clock or a process of its own decides them.

With several ranks each runs the same scheduler over the same messages. What the leader decides travels in front of the
next messages, so that all ranks act on it at the same point.
"""

from __future__ import annotations

import msgspec

from sglang.srt.managers.wire.io_struct import FinishReason


class EndReq(msgspec.Struct, tag=True, omit_defaults=True):
    """End a request. Unknown ids are ignored: it may have ended on its own."""

    rid: str
    reason: FinishReason


class GrammarVerified(msgspec.Struct, tag=True, omit_defaults=True):
    """The grammar of a waiting request compiles within all limits: every rank makes its own copy."""

    rid: str
    seconds: float
    """Seconds that compiling took."""


class Beat(msgspec.Struct, tag=True):
    """Nobody has sent anything for a while: every rank answers, so that a machine that is gone is noticed."""


LeaderDecision = EndReq | GrammarVerified | Beat
