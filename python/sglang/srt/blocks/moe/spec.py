"""Mixtures of experts, as a block of `layer_spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

from sglang.srt.blocks.mlp.spec import Dense, up_parts
from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import FeedForwardDefaults
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import RankLayout, ShardRange, padded_share, whole
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    from typing import Self


SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True, slots=True)
class Router:
    """An MoE router: how experts are scored and chosen for a token.

    The `top_k` experts with the largest scores (plus correction bias, within the best `top_groups` of `num_groups`
    groups) are chosen. Their scores, divided by their sum if `renormalize`, times `scale` are the weights.

        score: function of the logits, one of SCORES
        correction, hash_table: the last component of these tensors' names in checkpoints; "": there is none. With a
            hash table token ids choose the experts, and scores only weight them
        bias: the router's linear layer has one
        scales_inputs: an expert's weight multiplies its input instead of its output (top_k 1 only)
        float32: the router's weights are kept and multiplied in fp32
        exact_logits: the router's weights have the model's dtype, but its logits are not rounded to it
        sinks: number of shared experts that are scored with the routed ones; their scores count in the sum and weight
            their outputs
        scaled: a number in the checkpoint multiplies all weights
        logit_scale: multiplies the logits, of weights in fp32 (`float32`)
        image_correction: the last component of the name of the bias that takes the place of `correction`, or of the
            hash table, for image tokens (`image_token`; None: images are not served, and it is not read)
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction: str = ""
    hash_table: str = ""
    bias: bool = False
    scales_inputs: bool = False
    float32: bool = False
    exact_logits: bool = False
    sinks: int = 0
    scaled: bool = False
    logit_scale: float = 1.0
    image_correction: str = ""
    image_token: int | None = None

    @property
    def op(self) -> str:
        return "topk_hash" if self.hash_table else f"topk_{self.score}"

    @property
    def scored_op(self) -> str:
        """The op that chooses by scores: of all tokens, or of images' where a table chooses for texts; "": none."""
        return f"topk_{self.score}" if not self.hash_table or self.image_token is not None else ""

    @property
    def reads_ids(self) -> bool:
        """Returns whether the choice depends on token ids."""
        return bool(self.hash_table) or self.image_token is not None

    def problems(self, num_experts: int) -> list[str]:
        """Returns messages about settings that contradict each other; empty if there are none."""
        if self.num_groups < 1 or num_experts % self.num_groups:
            return [f"{num_experts} experts do not divide into {self.num_groups} groups"]
        members = num_experts // self.num_groups
        problems = []
        if not 1 <= self.top_groups <= self.num_groups:
            problems.append(f"{self.top_groups} of {self.num_groups} groups cannot be chosen")
        if self.top_groups < self.num_groups and members < 2 and self.score != "softmax":
            problems.append("groups are ranked by their two best experts and have one")
        if not 1 <= self.top_k <= members * self.top_groups:
            problems.append(f"{self.top_k} experts cannot be chosen from {self.top_groups} groups of {members}")
        if self.scales_inputs and self.top_k != 1:
            problems.append(f"weights multiply what an expert takes, but {self.top_k} experts take it")
        if self.score == "softmax" and (self.correction or self.hash_table):
            problems.append("softmax routing has no correction bias or hash table")
        return problems


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared expert, which every token goes to.

    gated: weighted by the sigmoid of a linear layer with one output
    scale_group: as in Dense
    activation: None: that of the routed experts
    members: > 0: it stands for that many experts that the router weights (`Router.sinks`), one alternating tensor
        in the checkpoint
    """

    intermediate_size: int
    gated: bool = False
    scale_group: int = 1
    activation: Activation | None = None
    members: int = 0

    def dense(self, activation: Activation) -> Dense:
        """Returns the shared expert as an MLP, for where it is computed apart from the routed ones. `activation`: that
        of the routed experts."""
        mlp = Dense(self.intermediate_size, activation=self.activation or activation, scale_group=self.scale_group)
        return replace(mlp, alternating=True, members=self.members) if self.members else mlp


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms around experts that take a projection of the hidden states: of its rows before them, and of each expert's
    output before outputs are weighted and added up. `eps`: epsilon of the former; `eps_after`: of the latter, which
    norms the output times its weight."""

    eps: float
    eps_after: float


@dataclass(frozen=True, slots=True)
class MoE(FeedForwardDefaults):
    """Routed experts of equal intermediate size, with an optional shared one.

    bias: the experts have biases
    form: how checkpoints store experts: "" one by one; "by_matrix" one tensor for each matrix of all experts; else
        one of `layers.quantization.experts_fused.FUSED`, for 16-bit checkpoints
    vocab_size: rows of the router's hash table
    slots: > 0: the experts lie in main memory, and so many of them in GPU memory at a time (`plan/expert_slots`),
        beside buffers that layers share, each with room for up to `buffered`
    cpu_threads: > 0: so many threads of CPUs compute some of the experts that are in no slot
    """

    num_experts: int
    intermediate_size: int
    router: Router
    activation: Activation = SILU
    bias: bool = False
    shared: Shared | None = None
    form: str = ""
    vocab_size: int = 0
    latent_size: int = 0  # > 0: the routed experts take a projection of the hidden states to that many dims
    latent_norms: ExpertNorms | None = None
    cuts_latents: bool = False
    """The projections around experts that take one are divided among ranks (`latent_share`), and there is no shared
    expert. Otherwise every rank has all of them: where they are small, reading them takes less time than two more
    collectives a layer."""
    latent_scale_rows: int = 1  # contiguous rows of these projections that share scales in the checkpoint
    fused_shared: bool = False  # the shared expert is held as one more of the routed ones
    branches: bool = False
    """The shared expert and the routed ones are branches, each between norms of its own. The router norms the stream
    too, and scales the weights of every expert by a number of its own (Gemma 4)."""
    slots: int = 0
    buffered: int = 0
    cpu_threads: int = 0

    @property
    def top_k(self) -> int:
        return self.router.top_k

    @property
    def experts(self) -> MoE:
        return self

    @property
    def mlp(self) -> Dense | None:
        return None if self.shared is None or self.fused_shared else self.shared.dense(self.activation)

    def with_image_token(self, token: int) -> Self:
        if not self.router.image_correction:
            return self
        return replace(self, router=replace(self.router, image_token=token))

    def with_slots(self, slots: int, buffered: int) -> Self:
        return replace(self, slots=slots, buffered=buffered)

    def with_cpu_threads(self, threads: int) -> Self:
        return replace(self, cpu_threads=threads)

    def with_scale_groups(self, group_of: Callable[[str, Dense], int]) -> MoE:
        if self.shared is None:
            return self
        group = group_of("moe.shared", self.shared.dense(self.activation))
        return replace(self, shared=replace(self.shared, scale_group=group))

    def with_scale_rows(self, rows_of: Callable[[Matrix], int]) -> Self:
        if not self.cuts_latents:
            return self
        rows = (rows_of(Matrix(name, ("",), 0, 0)) for name in ("moe.latent_in", "moe.latent_out"))
        return replace(self, latent_scale_rows=lcm(*rows))

    def latent_share(self, features: int, rank: int, tp_size: int) -> ShardRange:
        """Returns a rank's share of the output features of a projection around the experts: all of them where equal
        shares would cut rows that share scales, or are not wanted."""
        if not self.cuts_latents or features % (tp_size * self.latent_scale_rows):
            return whole(features)
        return padded_share(features, features // tp_size, rank)

    @property
    def defers_all_reduce(self) -> bool:
        return not self.cuts_latents

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        for op in dict.fromkeys((self.router.op, self.router.scored_op)):
            if op:
                yield Need(op, q_dtype=parallel.dtype)
        traits = {self.activation.trait} - {""} | ({"expert_bias"} if self.bias else set())
        yield Need("fused_moe", q_dtype=parallel.dtype, traits=frozenset(traits))
        if self.slots:
            yield Need("expert_slots", q_dtype=parallel.dtype)
        if self.cpu_threads:
            yield Need("cpu_experts", q_dtype=parallel.dtype)
        if self.shared is not None and not self.fused_shared:
            yield from self.shared.dense(self.activation).needs(parallel)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        experts, router = ranks.padded_experts(self.num_experts) + self.fused_shared, self.router
        dtype = "float32" if router.float32 else None
        up, width = up_parts(self.activation), self.latent_size or hidden_size
        scored, numbers = self.num_experts + router.sinks, (self.slots, self.buffered)
        parts: list[Matrix | Elements] = [
            Matrix("moe.router", ("",), scored, hidden_size, router.bias, quantized=False, dtype=dtype, adapted=False),
            Matrix("moe.w13", up, len(up) * expert_rows, width, self.bias, experts=experts).in_slots(*numbers),
            Matrix("moe.w2", ("down",), width, expert_rows, self.bias, experts=experts).in_slots(*numbers),
        ]
        if self.latent_size:
            rows_in, rows_out = (self.latent_share(n, 0, ranks.tp_size).padded_count for n in (width, hidden_size))
            parts.append(Matrix("moe.latent_in", ("",), rows_in, hidden_size))
            parts.append(Matrix("moe.latent_out", ("",), rows_out, width))
        if self.latent_norms is not None:
            parts.append(Elements(2 * width, "float32"))
        corrections = bool(router.correction) + (router.image_token is not None)
        if corrections:
            parts.append(Elements(corrections * self.num_experts, "float32"))
        if router.scaled:
            parts.append(Elements(1, "float32"))
        if router.hash_table:
            parts.append(Elements(self.vocab_size * router.top_k, "int32"))
        if self.shared is not None and not self.fused_shared:
            parts += self.shared.dense(self.activation).matrices("moe.shared", hidden_size, ranks.tp_size)
        if self.shared is not None and self.shared.gated:
            parts.append(Matrix("moe.shared_gate", ("",), 1, hidden_size, quantized=False))
        if self.branches:  # these norms are besides the one that every block has
            parts += (Elements(3 * hidden_size), Elements(hidden_size + self.num_experts, "float32"))
        return tuple(parts)

    def activation_elements(self, hidden_size: int, ranks: RankLayout) -> int:
        columns = self.top_k + self.fused_shared
        shared = 0
        if self.shared is not None and not self.fused_shared:
            shared = 3 * self.shared.dense(self.activation).padded_rows(ranks.tp_size)
        norms = 4 * hidden_size if self.branches else 0
        # All of a token's experts may be on one rank.
        dims = 3 * -(-self.intermediate_size // ranks.expert_tp_size)
        return columns * (dims + hidden_size) + shared + norms


def why_apart(experts: MoE, routed: ModuleQuant | None, shared: Sequence[ModuleQuant | None]) -> str | None:
    """Returns why the shared expert, whose projections have the quantizations `shared`, cannot be held as one more
    routed expert; None: it can."""
    expert = experts.shared
    if expert is None:
        return "there is none"
    if expert.gated:
        return "it has a gate of its own"
    if experts.branches:
        return "it has norms of its own"
    if experts.router.scales_inputs:
        return "what the routed ones take is multiplied by their weights"
    if expert.activation not in (None, experts.activation):
        return "its activation has another limit"
    if experts.latent_size:
        return "it takes the hidden states, theirs a projection of them"
    if expert.intermediate_size != experts.intermediate_size:
        return f"its intermediate size is {expert.intermediate_size}, theirs {experts.intermediate_size}"
    if experts.form or experts.bias:
        return "the checkpoint keeps the experts together"
    if routed is not None and routed.trellises:
        return "each trellis has bits of its own"
    other = [quant for quant in shared if quant != routed]
    if other:
        own_name, their_name = (quant.scheme if quant else "16 bits" for quant in (other[0], routed))
        return f"its weights are {own_name}, theirs {their_name}"
    return None
