"""Decides which all-reduces are quantized to eight bits (--enable-quantized-all-reduce)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.all_reduce_table import quantized_from
from sglang.srt.kernels.spec import PeerLinks
from sglang.srt.server_args import ServerArgs

GROUP = 32
"""Number of values with one scale; a test holds distributed/quantized_sums to it."""
FLAG = "--enable-quantized-all-reduce"


@dataclass(frozen=True, slots=True)
class QuantizedAllReduceRule:
    """All-reduces of hidden states with at least this many bytes and rows are quantized. That of the embedding never
    is, because each row comes from one rank."""

    least_bytes: int
    least_rows: int
    reason: str

    def __str__(self) -> str:
        return f"from {self.least_bytes:,} bytes and {self.least_rows:,} rows on, as e4m3 ({self.reason})"


def quantized_sum_rule(
    args: ServerArgs, arch: ArchTraits, links: PeerLinks | None, hidden_size: int, decode_rows: int
) -> QuantizedAllReduceRule | None:
    """Returns the rule; None where nothing is quantized. `links`: None for CPUs or links that were not probed;
    `decode_rows`: most rows of a step without prompts, of all attention groups. Raises UserError where the flag cannot
    be followed."""
    if args.enable_quantized_all_reduce == "off":
        if args.quantized_all_reduce_min_bytes is not None:
            raise UserError(f"--quantized-all-reduce-min-bytes is for {FLAG} prefill or all")
        return None
    if args.tp_size == 1:
        raise UserError(f"{FLAG} is for sums over the ranks of --tp-size, of which there is one")
    if hidden_size % GROUP:
        raise UserError(f"{FLAG}: the hidden size {hidden_size} is no multiple of {GROUP}, the values with one scale")
    if arch.device == "cuda" and "fp8_mma" not in arch.features:
        raise UserError(f"{FLAG}: {arch.name} has no instructions for e4m3; leave it off")
    least, reason = quantized_from(None, args.tp_size)
    if links is not None:
        least, reason = quantized_from(links.library_topology, args.tp_size, by_library=bool(links.problem))
    if args.quantized_all_reduce_min_bytes is not None:
        least, reason = args.quantized_all_reduce_min_bytes, "--quantized-all-reduce-min-bytes"
    rows = decode_rows + 1 if args.enable_quantized_all_reduce == "prefill" else 1
    return QuantizedAllReduceRule(least, rows, reason)
