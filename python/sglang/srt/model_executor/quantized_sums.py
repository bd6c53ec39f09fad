"""Quantizes all-reduces to eight bits if the plan says so."""

from __future__ import annotations

from sglang.srt.distributed.groups import Groups
from sglang.srt.distributed.quantized_sums import Codec, QuantizedSums, TorchCodec
from sglang.srt.kernels.all_reduce_table import LIBRARY_PIECE_BYTES
from sglang.srt.plan.plan import Plan


def quantize_sums(groups: Groups, plan: Plan) -> None:
    """Makes the groups' large all-reduces quantized, as planned. Call before anything is computed or captured."""
    rule = plan.quantized_sums
    if rule is None:
        return
    codec: Codec = TorchCodec()
    if plan.device == "cuda":
        from sglang.srt.layers.triton_ops.quantized_sums import TritonCodec

        codec = TritonCodec()
    minimum = rule.least_bytes, rule.least_rows
    groups.quantize_with(
        lambda group: QuantizedSums(group.communicator(), codec, *minimum, LIBRARY_PIECE_BYTES, group.peers)
    )
