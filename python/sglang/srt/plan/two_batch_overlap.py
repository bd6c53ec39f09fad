"""Decides which steps run as two microbatches whose all-reduces and computation overlap
(--enable-two-batch-overlap)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.spec import Choice
from sglang.srt.kernels.two_batch_table import TwoBatchThreshold, two_batch_threshold
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.server_args import ServerArgs

FLAG = "--enable-two-batch-overlap"
ATTENTION = ("decode_attention", "extend_attention")
THREADS_LEAST = 2
"""Factor on the table's tokens where microbatches run in two threads: switching takes the host as long as a launch."""


@dataclass(frozen=True, slots=True)
class TwoBatchRule:
    """Steps with prompts of at least `min_tokens` tokens run as two microbatches, unless their prompts contain
    images."""

    min_tokens: int
    reason: str
    exact: bool = False
    """True: their all-reduces are not quantized, even where those of whole steps are."""

    def __str__(self) -> str:
        return f"from {self.min_tokens:,} tokens on ({self.reason})"


def two_batch_rule(
    args: ServerArgs, topology: Topology | None, model: ModelDescription, choices: Mapping[str, Choice]
) -> TwoBatchRule | None:
    """Returns the rule; None where every step runs whole. `topology`: the path of large all-reduces; None: CPUs, or it
    was not probed. Raises UserError where the flag cannot be followed."""
    if args.enable_two_batch_overlap and args.disable_two_batch_overlap:
        raise UserError(f"{FLAG} and --disable-two-batch-overlap contradict each other")
    if args.disable_two_batch_overlap:
        return None
    row = two_batch_threshold(topology, args.tp_size, has_experts(model), args.enable_quantized_all_reduce != "off")
    if not args.enable_two_batch_overlap and not (row.unasked and args.attn_dp_size == 1):
        return None  # nothing is predicted for DP attention, whose gathered rows are padded, more so in microbatches
    problem = why_not_split(args.tp_size, args.dcp_size) or _why_attention_cannot(choices)
    if model.transformers_class is not None:
        problem = "a class of transformers computes a step as a whole"
    if problem and args.enable_two_batch_overlap:
        raise UserError(f"{FLAG}: {problem}")
    if problem:
        return None
    if args.two_batch_overlap_min_tokens is not None:
        return TwoBatchRule(args.two_batch_overlap_min_tokens, "--two-batch-overlap-min-tokens", row.exact)
    return TwoBatchRule(min_tokens(row, model, args.attn_dp_size), row.reason, row.exact)


def min_tokens(row: TwoBatchThreshold, model: ModelDescription, attn_dp_size: int) -> int:
    """Returns the number of tokens from which on the model's steps run as two microbatches, by the row of the table."""
    return row.least * (1 if alternates_by_block(model, attn_dp_size) else THREADS_LEAST)


def alternates_by_block(model: ModelDescription, attn_dp_size: int) -> bool:
    """Returns whether every block defers its all-reduce to the norm behind it and needs no other collective, so that
    microbatches alternate block by block in one thread (`CausalLM.defers_all_reduce`)."""
    return attn_dp_size == 1 and model.per_layer_inputs is None and all(map(_defers_all_reduce, model.layers))


def _defers_all_reduce(layer: LayerSpec) -> bool:
    """Returns whether the layer defers its all-reduces: no bias is part of the sum, no norm or factor comes right
    behind it, and no norm spans the heads of all ranks. A convolution may: each rank convolves its partial sums."""
    return all(part.defers_all_reduce for part in (layer.residual, layer.mixer, layer.ffn))


def has_experts(model: ModelDescription) -> bool:
    """Returns whether any layer has routed experts."""
    return model.experts is not None


def why_not_split(tp_size: int, dcp_size: int) -> str:
    """Returns why ranks of this layout compute every step whole; "" if they need not."""
    if tp_size == 1:
        return "sums travel over the ranks of --tp-size, of which there is one"
    if dcp_size > 1:
        return (
            "with --dcp-size attention itself exchanges, for decoding requests alone, so that microbatches would differ"
        )
    return ""


def _why_attention_cannot(choices: Mapping[str, Choice]) -> str:
    """Returns why a chosen kernel cannot serve two microbatches: FlashInfer's wrapper for latents holds one plan at a
    time. "" if all can."""
    named = [op for op in choices if op.startswith(ATTENTION) and choices[op].name == "flashinfer_mla"]
    return f"{named[0]} over latents by FlashInfer keeps one plan; --attention-backend triton can" if named else ""
