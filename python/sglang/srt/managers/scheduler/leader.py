"""Decisions that only one rank can take, because they depend on a clock or on one of its processes.

All ranks run the same scheduler over the same messages. The leader's decisions are sent before the next messages, so
that all ranks act on them at the same point.
"""

from __future__ import annotations

import msgspec

from sglang.srt.managers.wire.io_struct import FinishReason


class EndReq(msgspec.Struct, tag=True, omit_defaults=True):
    """Ends a request. Unknown ids are ignored: the request may have ended already."""

    rid: str
    reason: FinishReason


class GrammarVerified(msgspec.Struct, tag=True, omit_defaults=True):
    """The grammar of a waiting request compiles within all limits, so every rank must build its own copy."""

    rid: str
    seconds: float
    """Seconds that compiling took."""


class SlowMask(msgspec.Struct, tag=True):
    """How long a request's grammar takes for a token. Those that take long bring tokens in turns. Unknown ids are
    ignored."""

    rid: str
    milliseconds: int
    """0: not long."""


class DrainSlots(msgspec.Struct, tag=True):
    """The request that waits for a slot for its adapter has waited long: others with an adapter wait behind it. Another
    id than that of the one that waits is ignored."""

    rid: str


class Heartbeat(msgspec.Struct, tag=True):
    """A message during silence that every rank answers, so that a lost machine is noticed."""


LeaderDecision = EndReq | GrammarVerified | SlowMask | DrainSlots | Heartbeat
