"""Plans the memory of LoRA adapters: how many lie on the device at once, of which rank, for which modules. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.configs.adapters.arguments import MODULES_OF, named_adapters
from sglang.srt.configs.adapters.config import EMBEDDINGS, HEADS, MAX_RANK
from sglang.srt.configs.adapters.files import AdapterFiles, read_adapter_files
from sglang.srt.configs.quant_scheme import EXL3
from sglang.srt.errors import UserError
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.weight_names import WeightMap
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.server_args import ServerArgs

EXPERT_MODULES: Mapping[str, frozenset[str]] = {
    "gate": frozenset({"gate_proj", "gate_up_proj", "w1"}),
    "up": frozenset({"up_proj", "gate_up_proj", "w3"}),
    "down": frozenset({"down_proj", "w2"}),
}
"""Names of the matrices of experts in adapters."""
BYTES_OF_SCALES = 8
"""A factor and a shift in fp32 of each row of a linear layer, for adapters that scale rows."""
RANK_MULTIPLE = 16
"""Ranks are padded to a multiple of it in memory; kernels stop at the rank."""


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The memory for adapters on a device. `slots`: adapters at once; `rank`: the largest that one may have; `targets`:
    last names of the modules that may have A and B, None: all linear layers of the decoder's layers; `ends`: then the
    embedding and the output head, too; `shared_outer`: A of gate and up and B of down are the same for all experts of a
    layer."""

    slots: int
    rank: int
    targets: frozenset[str] | None
    shared_outer: bool = False
    strict: bool = False
    """Whether an adapter must have each linear layer that its config names."""
    ends: bool = False
    dora: bool = False
    """Whether adapters may scale the rows of linear layers."""

    @property
    def room(self) -> int:
        """Returns the rank for which there is memory."""
        return -(-self.rank // RANK_MULTIPLE) * RANK_MULTIPLE

    def for_names(self, names: WeightMap) -> AdapterPlan:
        """Returns the plan with the targets' names in the model's checkpoints, too."""
        if self.targets is None:
            return self
        targets = {part for name in self.targets for part in (name, *MODULES_OF.get(name, ()))}
        for theirs, ours in names.modules:
            if theirs.rpartition(".")[2] in self.targets:
                targets.add(ours.rpartition(".")[2])
        return replace(self, targets=frozenset(targets))

    def serves(self, modules: Iterable[str]) -> bool:
        """Returns whether a layer made of these modules has memory for adapters."""
        return self.targets is None or any(module.rpartition(".")[2] in self.targets for module in modules)

    def serves_experts(self, parts: Iterable[str]) -> bool:
        """Returns whether a product of experts, made of these matrices (gate, up, down), has memory for adapters."""
        return self.targets is None or any(not EXPERT_MODULES[part].isdisjoint(self.targets) for part in parts)

    @property
    def serves_embedding(self) -> bool:
        """Returns whether the embedding has memory for adapters."""
        return self.ends if self.targets is None else not self.targets.isdisjoint(EMBEDDINGS)

    @property
    def serves_head(self) -> bool:
        """Returns whether the output head has memory for adapters."""
        return self.ends if self.targets is None else not self.targets.isdisjoint(HEADS)

    def num_bytes(self, of_rank: RankWeights, dtype: str) -> int:
        """Returns the bytes of A and B of all slots on a rank, and of what scales rows."""
        elements = scaled = 0
        for layer, matrix in layer_matrices(of_rank):
            if matrix.experts:
                elements += self._of_experts(matrix)
            elif self.serves(of_rank.model.names.layer_module(layer, matrix.name, part) for part in matrix.parts):
                elements += self.room * (len(matrix.parts) * matrix.cols + matrix.rows)
                scaled += matrix.rows
        for layer, heads in latent_layers(of_rank):
            if self.serves([of_rank.model.names.layer_module(layer, "attn.kv_b")]):
                rows = heads.shares(of_rank.ranks.attn_tp_size).padded_heads * (heads.nope_dim + heads.v_dim)
                elements += self.room * (rows + 2 * heads.kv_lora_rank)
        model, head = of_rank.model, of_rank.head
        plain = model.first_stage and model.embedding.norm is None
        num_ends = (plain and self.serves_embedding) + (model.last_stage and self.serves_head)
        elements += num_ends * self.room * (head.rows + head.cols)
        scaled += head.rows if model.last_stage and self.serves_head else 0
        scaled += head.cols if plain and self.serves_embedding else 0
        of_scales = BYTES_OF_SCALES * scaled * (1 + self.slots) if self.dora else 0
        return self.slots * elements * KV_DTYPE_BYTES[dtype] + of_scales

    def _of_experts(self, matrix: Matrix) -> int:
        """Returns the elements of A and B of a slot for a product of experts on a rank."""
        if not self.serves_experts(matrix.parts):
            return 0
        with_a, with_b = matrix.experts, matrix.experts
        if self.shared_outer:
            with_a, with_b = (matrix.experts, 1) if matrix.parts == ("down",) else (1, matrix.experts)
        return self.room * (with_a * len(matrix.parts) * matrix.cols + with_b * matrix.rows)

    def describe(self) -> dict[str, Any]:
        """Describes the plan for /server_info."""
        targets = "all" if self.targets is None else sorted(self.targets)
        if self.targets is None and not self.ends:
            targets = "all but embed_tokens and lm_head"
        described = {"slots": self.slots, "max_rank": self.rank, "target_modules": targets}
        described |= {"experts_shared_outer": True} if self.shared_outer else {}
        return described | ({"scaled_rows": True} if self.dora else {})


def most_products(of_rank: RankWeights) -> int:
    """Returns a number that the products of a rank which have memory for adapters do not exceed."""
    return sum(1 for _ in layer_matrices(of_rank)) + 2 * sum(1 for _ in latent_layers(of_rank)) + 2


def latent_layers(of_rank: RankWeights) -> Iterator[tuple[int, MLA]]:
    """Yields the layers of a rank with latent attention, whose `kv_b_proj` is no linear layer."""
    for layer, (spec, weights) in enumerate(zip(of_rank.model.layers, of_rank.layers, strict=True)):
        if weights and spec.mixer.latent_heads is not None:
            yield layer, spec.mixer.latent_heads


def adds_to_pairs(model: ModelDescription) -> bool:
    """Returns whether adapters of the model need the kernels of experts: of pairs of a token and an expert or head."""
    return model.experts is not None or any(layer.mixer.latent_heads for layer in model.layers)


def layer_matrices(of_rank: RankWeights) -> Iterator[tuple[int, Matrix]]:
    """Yields the linear layers and products of experts of a rank that may have adapters, with their layer's number."""
    for layer, weights in enumerate(of_rank.layers):
        for part in weights:
            if isinstance(part, Matrix) and part.adapted and (part.experts or part.name in of_rank.model.names.layer):
                yield layer, part


def plan_adapters(args: ServerArgs) -> AdapterPlan | None:
    """Returns the plan that the flags ask for; None: the server takes no adapters. Raises UserError for adapters of
    --lora-paths that cannot be served."""
    if not args.enable_lora:
        return None
    rank, targets = args.max_lora_rank, _asked_targets(args.lora_target_modules)
    adapters = named_adapters(args.lora_paths or ())
    files = [read_adapter_files(adapter.folder) for adapter in adapters]
    if rank is None:
        if not files:
            raise UserError("--enable-lora without --lora-paths needs --max-lora-rank, the largest rank of an adapter.")
        rank = max(each.largest_rank for each in files)
    if args.lora_target_modules is None and files:
        targets = frozenset(module.rpartition(".")[2] for each in files for module in each.pairs)
    for each in files:
        if each.largest_rank > rank:
            raise UserError(f"{each.folder} has rank {each.largest_rank}, above --max-lora-rank {rank}.")
    shared = args.experts_shared_outer_loras or (shares_outer(files) and not args.no_experts_shared_outer_loras)
    ends = args.lora_target_modules == ["all"]
    dora = any(each.scales_rows for each in files)
    return AdapterPlan(
        args.max_loras_per_batch, min(rank, MAX_RANK), targets, shared, args.lora_strict_loading, ends, dora
    )


def shares_outer(adapters: Sequence[AdapterFiles]) -> bool:
    """Returns whether all experts of a layer share A of gate and up and B of down in all of these adapters."""
    pairs = [(module, pair) for each in adapters for module, pair in each.pairs.items() if ".experts." in module]
    return bool(pairs) and all(
        pair.shares_b if module.rpartition(".")[2] in EXPERT_MODULES["down"] else pair.shares_a
        for module, pair in pairs
    )


def check_adapters(adapters: AdapterPlan, model: ModelDescription) -> None:
    """Raises UserError for models that take no adapters."""
    if model.transformers_class is not None:
        raise UserError("--enable-lora: models by transformers take no adapters here; use a family that is served.")
    if model.pooling is not None:
        raise UserError("--enable-lora: models of embeddings and labels take no adapters here.")
    if adapters.serves_experts(EXPERT_MODULES) and any(
        layer.ffn.experts and layer.ffn.experts.cpu_threads for layer in model.layers
    ):
        raise UserError("--enable-lora: experts that CPUs compute take no adapters here; remove --kt-cpuinfer.")
    quant = model.expert_quant
    if adapters.serves_experts(EXPERT_MODULES) and quant is not None and quant.scheme == EXL3.name:
        raise UserError("--enable-lora: experts in EXL3 take no adapters here; name other --lora-target-modules.")


def _asked_targets(names: list[str] | None) -> frozenset[str] | None:
    """Returns the modules of --lora-target-modules; None: all."""
    if names is None or names == ["all"]:
        return None
    return frozenset(module for name in names for module in (name, *MODULES_OF.get(name, ())))
