"""LoRA adapters of the model's linear layers: A and B of several adapters in slots, added to what a layer computes.

The layers share one `AdapterLayers`, which knows the slot of each token of the step that is being computed. Without
any, as in steps of requests without adapters, the layers do nothing more than ask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open

from sglang.srt.configs.adapters.config import CONFIG_NAME, EMBEDDINGS, HEADS
from sglang.srt.configs.adapters.files import AdapterFiles, AdapterPair
from sglang.srt.distributed.groups import Group
from sglang.srt.errors import UserError
from sglang.srt.layers.adapter_memory import AdapterMemory, HostAdapter, StepTokens
from sglang.srt.layers.adapter_scales import Base, BaseProduct, EmbeddingRows, Product, scale_rows, unscaled
from sglang.srt.layers.expert_adapters import (
    EXPERT_MODULE,
    LAYER_OF,
    PARTS_OF,
    AdapterExperts,
    ExpertPlace,
    LayerExperts,
    ProductRows,
)
from sglang.srt.layers.latent_adapters import LatentAdapters, LatentDims
from sglang.srt.layers.native_adapters import AdapterWeights, empty_slot
from sglang.srt.layers.ops import ADD_ADAPTERS, ADD_EXPERT_ADAPTERS
from sglang.srt.plan.adapters import EXPERT_MODULES, adds_to_pairs, most_products
from sglang.srt.plan.ranks import ShardRange, whole

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class ModuleRows(NamedTuple):
    """Rows of one module that a linear layer of this rank has, or one of several slices of them. `module`: its name in
    the checkpoint; `part`: its name in the layer; `rows`, `cols`: of its output and input features."""

    module: str
    part: str
    rows: ShardRange
    cols: ShardRange


@dataclass(frozen=True, slots=True)
class Place:
    """Where one slice of a module's rows lies in a linear layer: from row `begin` on, as part `part`."""

    linear: AdapterLinear
    shard: ModuleRows
    begin: int
    part: int


_END = re.compile(rf"(?:(?:model|language_model)\.)*(?P<name>{'|'.join((*EMBEDDINGS, *HEADS))})")
"""The embedding or the output head in an adapter, whatever the model's checkpoints call it."""
ASIDE = 17
"""Tokens from which A x has a stream of its own. Kernels of smaller products begin while the launch ahead of them
ends, which a second stream would prevent."""


@dataclass(frozen=True, slots=True)
class ModulePlaces:
    """Where all rows of a module lie."""

    places: Sequence[Place]

    def put_lengths(self, adapter: HostAdapter, lengths: torch.Tensor) -> None:
        """Puts this rank's share of DoRA's lengths of the rows into an adapter."""
        for place in self.places:
            linear, rows = place.linear, place.shard.rows
            mine = adapter.lengths.setdefault(linear.number, torch.full((len(linear.weights.parts),), torch.nan))
            mine[place.begin : place.begin + rows.count] = lengths[rows.run]

    def put(self, adapter: HostAdapter, pair: AdapterPair, a: torch.Tensor, b: torch.Tensor, pinned: bool) -> None:
        """Puts this rank's share of a file's A and B into an adapter."""
        rank = len(a)
        for place in self.places:
            number, shard = place.linear.number, place.shard
            if number not in adapter.matrices:
                adapter.matrices[number] = place.linear.empty(pinned)
            whole_a, whole_b = adapter.matrices[number]
            whole_a[place.part, :rank, : shard.cols.count] = a[:, shard.cols.run]
            whole_b[place.begin : place.begin + shard.rows.count, :rank] = b[shard.rows.run]
            adapter.ranks[number, 0] = max(int(adapter.ranks[number, 0]), rank)


class AdapterLinear:
    """A and B of one linear layer, in slots."""

    def __init__(
        self, layers: AdapterLayers, number: int, shards: Sequence[ModuleRows], base: Base | None = None
    ) -> None:
        """base: what computes the layer without adapters; None: DoRA may not scale its rows."""
        plan, device, dtype = layers.plan, layers.device, layers.dtype
        self.layers, self.number = layers, number
        names = list(dict.fromkeys(shard.part for shard in shards))
        heights = [shard.rows.padded_count for shard in shards]
        numbers = [names.index(shard.part) for shard in shards]
        parts = torch.repeat_interleave(torch.tensor(numbers, dtype=torch.int32), torch.tensor(heights))
        self.weights = layers.kernels.prepare(
            AdapterWeights(
                torch.zeros(
                    (plan.slots, len(names), plan.room, shards[0].cols.padded_count), dtype=dtype, device=device
                ),
                torch.zeros((plan.slots, sum(heights), plan.room), dtype=dtype, device=device),
                layers.ranks[number],
                parts.to(device),
            )
        )
        if base is not None and plan.dora:
            layers.scales[number] = unscaled(plan.slots, sum(heights), device)
        begins = [sum(heights[:i]) for i in range(len(shards))]
        self.places = [Place(self, *each) for each in zip(shards, begins, numbers, strict=True)]

    def added(self, product: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns what `product` computes of x [T, K], [T, N], with B A x of each token's adapter added. In the CUDA
        graph of a large step A x is computed beside the product."""
        layers, kernels, tokens = self.layers, self.layers.kernels, self.layers.tokens
        if tokens is None:
            return product()
        assert len(tokens.slots) == len(x), f"{len(x)} rows of a step of {len(tokens.slots)} tokens"
        if layers.stream is None or len(x) < ASIDE or not torch.cuda.is_current_stream_capturing():
            low, out = kernels.shrink(x, tokens.ordered, self.weights), product()
        else:
            main = torch.cuda.current_stream()
            layers.stream.wait_stream(main)
            with torch.cuda.stream(layers.stream):
                low = kernels.shrink(x, tokens.ordered, self.weights, aside=True)
            out = product()
            main.wait_stream(layers.stream)
        self._scale(out, tokens)
        kernels.expand(low, out, tokens.ordered, self.weights)
        return out

    def add(self, x: torch.Tensor, out: torch.Tensor, tokens: StepTokens) -> None:
        """Adds B A x of the adapters of some of a step's tokens to out [R, N], what the layer has computed of x [R, K].
        That is scaled before, if adapters may do so."""
        kernels = self.layers.kernels
        self._scale(out, tokens)
        kernels.expand(kernels.shrink(x, tokens.ordered, self.weights), out, tokens.ordered, self.weights)

    def look_up(self, ids: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """Adds B times column ids - `first` of A of each token's adapter to out [T, N], where A has it; ids [T]."""
        kernels, tokens = self.layers.kernels, self.layers.tokens
        if tokens is not None:
            self._scale(out, tokens)
            low = kernels.look_up(ids, first, tokens.ordered, self.weights)
            kernels.expand(low, out, tokens.ordered, self.weights)

    def _scale(self, out: torch.Tensor, tokens: StepTokens) -> None:
        scales = self.layers.scales.get(self.number)
        if scales is not None:
            scale_rows(out, tokens.slots, scales)

    def empty(self, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zeros in main memory in the form of a slot's A and B."""
        return empty_slot(self.weights.a, self.weights.b, pinned)


class AdapterLayers(AdapterMemory):
    """The linear layers and experts of a model that adapters may change."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        assert plan.adapters is not None
        super().__init__(plan.adapters, device, dtype, most_products(plan.weights))
        self.kernels = plan.entry(ADD_ADAPTERS)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.names = names = plan.description.names.with_text_names()
        others = [i for i, layer in enumerate(plan.description.layers) if layer.on_other_stage]
        self.on_other_stages = tuple(
            prefix for i in others for prefix in (names.layer_prefix.format(layer=i), f"layers.{i}.")
        )
        """What names of modules begin with whose adapters other stages of the pipeline have."""
        model = plan.description
        here = {names.model["embed"]: model.first_stage, names.model["lm_head"]: model.last_stage}
        self.ends_on_other_stages = frozenset(name for name, is_here in here.items() if not is_here)
        """The embedding and the output head, if another stage has it."""
        self.expert_kernels = plan.entry(ADD_EXPERT_ADAPTERS) if adds_to_pairs(model) else None
        self.experts_of: dict[str, AdapterExperts] = {}
        """The experts of a layer, by the layer's name without what stands before it."""
        self.shared_experts: dict[str, ExpertPlace] = {}
        """Modules of shared experts that are held among the routed ones."""
        self.places: dict[str, list[Place]] = {}
        """Where the rows of each module lie, by its name in the checkpoint."""
        self.scaled: dict[int, Base] = {}
        """The layers whose rows DoRA may scale, by the layer's number."""
        self.latents: dict[str, LatentAdapters] = {}
        """Those of `kv_b_proj` of latent attention, by its name in the checkpoint."""

    def begin_step(self, slots: torch.Tensor | None) -> None:
        """Begins a step of tokens with adapters in these slots, in this thread."""
        self.tokens = None if slots is None else self.ordered(slots)

    def ordered(self, slots: torch.Tensor) -> StepTokens:
        """Returns tokens with adapters in these slots."""
        return StepTokens(slots, self.kernels.order(slots, self.plan.slots))

    def resumed(self, blocks: Iterator[None]) -> Iterator[None]:
        """Yields as `blocks` does, between which another microbatch of the step may be computed in this thread."""
        tokens = self.tokens
        for _ in blocks:
            yield
            self.tokens = tokens

    def linear(self, shards: Sequence[ModuleRows], product: Product, group: Group | None) -> AdapterLinear | None:
        """Returns memory for the adapters of a linear layer, whose rows are these slices one below the other; None for
        one that has none. product: the layer's own; group: the ranks that have its other columns."""
        if not self.plan.serves(shard.module for shard in shards):
            return None
        return self._linear(shards, BaseProduct(product, shards[0].cols.count, group))

    def embedding(self, module: str, vocabulary: ShardRange, rows: torch.Tensor, group: Group) -> AdapterLinear | None:
        """Returns memory for the adapters of the embedding, of which this rank has these tokens' rows; None: it has
        none. group: the ranks that have those of others."""
        if not self.plan.serves_embedding or module in self.ends_on_other_stages:
            return None
        shard = ModuleRows(module, "", whole(rows.shape[1]), vocabulary)
        return self._linear([shard], EmbeddingRows(rows, group))

    def head(self, module: str, vocabulary: ShardRange, hidden_size: int, product: Product) -> AdapterLinear | None:
        """Returns memory for the adapters of the output head, of which this rank has these rows; None: it has none.
        product: the head's own."""
        if not self.plan.serves_head:
            return None
        shard = ModuleRows(module, "", vocabulary, whole(hidden_size))
        return self._linear([shard], BaseProduct(product, hidden_size, None))

    def _linear(self, shards: Sequence[ModuleRows], base: Base) -> AdapterLinear:
        linear = AdapterLinear(self, len(self.linears), shards, base)
        self.linears.append(linear.weights)
        if self.plan.dora:
            self.scaled[linear.number] = base
        for place in linear.places:
            self.places.setdefault(place.shard.module, []).append(place)
        return linear

    def latent(self, module: str, dims: LatentDims) -> LatentAdapters | None:
        """Returns memory for the adapters of a layer's `kv_b_proj`; None: it has none."""
        if not self.plan.serves([module]):
            return None
        assert self.expert_kernels is not None
        latents = self.latents[module] = LatentAdapters(self, self.expert_kernels, dims)
        return latents

    def experts(
        self,
        layer: LayerExperts,
        products: Sequence[ProductRows],
        module: str,
        shared: Mapping[str, str],
    ) -> AdapterExperts | None:
        """Returns memory for the adapters of a layer's experts; None if they have none. module: a name of one of them,
        or that of all; shared: the module of each matrix of the shared expert, where it is held among the others."""
        assert self.expert_kernels is not None
        named = EXPERT_MODULE.fullmatch(module)
        base = module if named is None else named["experts"]
        if not self.plan.serves_experts(EXPERT_MODULES):
            return None
        experts = self.experts_of[self.key_of(base)] = AdapterExperts(self, self.expert_kernels, layer, products)
        for part, name in shared.items():
            self.shared_experts[name] = ExpertPlace(experts, f"{part}_proj", layer.count)
            if part == "gate" and name.endswith("gate_proj"):
                joined = name.removesuffix("gate_proj") + "gate_up_proj"
                self.shared_experts[joined] = ExpertPlace(experts, "gate_up_proj", layer.count)
        return experts

    @staticmethod
    def key_of(experts: str) -> str:
        """Returns the layer that the module is in. It has one module of experts, which transformers and checkpoints
        may call differently (`mlp.experts`, `block_sparse_moe.experts`)."""
        layer = LAYER_OF.match(experts)
        return experts if layer is None else layer[1]

    def read(self, files: AdapterFiles) -> HostAdapter:
        """Reads an adapter into main memory, this rank's share of it. Raises UserError if the model does not have its
        modules, they have other sizes, or a number is not finite. May run beside steps, in another thread."""
        if files.largest_rank > self.plan.rank:
            raise UserError(f"{files.folder} has rank {files.largest_rank}, above --max-lora-rank {self.plan.rank}.")
        all_pairs = [(self._target_of(module, files), module, pair) for module, pair in files.pairs.items()]
        pairs = [(target, module, pair) for target, module, pair in all_pairs if target is not None]
        # One version of PEFT wrote all of them, and some sizes do not tell.
        exchanged = any(isinstance(target, ExpertPlace) and target.is_exchanged(pair) for target, _, pair in pairs)
        pairs = [(target, module, replace(pair, exchanged=exchanged)) for target, module, pair in pairs]
        if self.plan.strict:
            self._refuse_missing(files)
        pinned = self.device.type == "cuda"
        adapter = HostAdapter({}, torch.zeros((len(self.ranks), 1), dtype=torch.int32, pin_memory=pinned))
        try:
            with safe_open(files.weights, "pt") as file:  # type: ignore[no-untyped-call]
                for target, module, pair in pairs:
                    a = file.get_tensor(pair.a).float().to(self.dtype)
                    b = (file.get_tensor(pair.b).float() * pair.scaling).to(self.dtype)
                    if not (a.isfinite().all() and b.isfinite().all()):
                        raise UserError(f"{files.folder}: {module} has a number that is not finite in {self.dtype}.")
                    target.put(adapter, pair, a, b, pinned)
                    if pair.magnitude:
                        assert isinstance(target, ModulePlaces)
                        lengths = file.get_tensor(pair.magnitude).float()
                        if not lengths.isfinite().all():
                            raise UserError(f"{files.folder}: {pair.magnitude} has a number that is not finite.")
                        target.put_lengths(adapter, lengths)
        except UserError:
            raise
        except Exception as error:  # also safetensors' own class, for a damaged file
            raise UserError(f"{files.weights} cannot be read: {error}.") from None
        return adapter

    def scale(self, adapter: HostAdapter) -> str:
        """Computes the factors of an adapter's rows from their lengths, and multiplies B by them. Returns why it cannot
        be served; "": it can. To be called between steps, on all ranks."""
        problem = ""
        for number, lengths in adapter.lengths.items():
            base, weights = self.scaled[number], self.linears[number]
            a, b = (side.to(self.device) for side in adapter.matrices[number])
            is_scaled = lengths.isfinite()
            now = base.lengths(a, b, weights.parts).cpu()
            factors = torch.where(is_scaled & (now > 0), lengths / now, 1.0)
            scaled_b = (b.float() * factors[:, None].to(self.device)).to(b.dtype)
            adapter.matrices[number][1].copy_(scaled_b)
            adapter.scales[number] = torch.stack((factors, (1.0 - factors) * base.bias(a).cpu()))
            longest = base.longest_row(len(b), self.dtype)
            fits = now.isfinite() & adapter.scales[number].isfinite().all(0) & scaled_b.isfinite().all(1).cpu()
            wrong = torch.nonzero(is_scaled & ~(fits & (lengths.abs() <= longest))).flatten().tolist()
            if wrong and not problem:
                problem = (
                    f"use_dora: row {wrong[0]} of {self._modules_of(number)} gets the length {lengths[wrong[0]]:.4g},"
                    f" and has {now[wrong[0]]:.4g} with B A; above {longest:.4g}, or by a factor that {self.dtype}"
                    " cannot hold, answers are no numbers"
                )
        adapter.lengths.clear()
        return problem

    def _modules_of(self, number: int) -> str:
        """Returns the names of the modules of a linear layer."""
        return ", ".join(
            module for module, places in self.places.items() if any(each.linear.number == number for each in places)
        )

    def _names_of(self, module: str) -> tuple[str, ...]:
        """Returns the names that a module of an adapter may have in the checkpoint."""
        name = self.names.canonical(f"{module}.weight").removesuffix(".weight")
        end = _END.fullmatch(module)
        if end is not None:
            name = self.names.model["embed" if end["name"] in EMBEDDINGS else "lm_head"]
        layer = LAYER_OF.match(module)
        if layer is None:
            return name, f"model.{name}"
        of_class = self.names.module_of_class(int(layer["number"]), module[layer.end() :])
        return name, f"model.{name}", of_class

    def _refuse_missing(self, files: AdapterFiles) -> None:
        """Raises UserError if the adapter lacks a linear layer that its config names."""
        there = {name for module in files.pairs for name in self._names_of(module)}
        ours = (*self.places, *self.latents)
        missing = next((name for name in ours if name not in there and files.config.names(name)), None)
        if missing is not None:
            raise UserError(
                f"{files.folder}: {missing} has no lora_A and lora_B, but {CONFIG_NAME} names it in target_modules"
                " (--lora-strict-loading)."
            )

    def _target_of(self, module: str, files: AdapterFiles) -> ModulePlaces | LatentAdapters | ExpertPlace | None:
        """Returns where A and B of a module go; None: to another stage, whose ranks check it. Raises UserError if the
        model has none of that name or size."""
        names, pair = self._names_of(module), files.pairs[module]
        if names[0] in self.ends_on_other_stages or any(
            each.startswith(self.on_other_stages) for each in (*names, LAYER_OF.sub(r"\1.", names[0]))
        ):
            return None
        place = next((place for each in names if (place := self._of_experts(each)) is not None), None)
        if pair.magnitude and (place is not None or any(each in self.latents for each in names)):
            raise UserError(f"{files.folder}: use_dora is not supported for {module}.")
        if place is not None:
            place.experts.check(place.module, pair, f"{files.folder}: {module}")
            return place
        latents = next((self.latents[each] for each in names if each in self.latents), None)
        if latents is not None:
            latents.check(module, pair, str(files.folder))
            return latents
        places = next((there for each in names if (there := self._places_of(each)) is not None), None)
        if places is None or pair.experts:
            raise UserError(f"{files.folder}: {module} is not served: {self._why_not(module)}.")
        shard = places[0].shard
        if (pair.outputs, pair.inputs) != (shard.rows.total, shard.cols.total):
            raise UserError(
                f"{files.folder}: {module} is of [{pair.outputs}, {pair.inputs}], but the model's is of"
                f" [{shard.rows.total}, {shard.cols.total}]. Was the adapter made for another model?"
            )
        if pair.magnitude and any(place.linear.number not in self.scaled for place in places):
            raise UserError(
                f"{files.folder}: {module}: the server has no room for factors of rows (use_dora). Start it with an"
                " adapter that has them in --lora-paths."
            )
        return ModulePlaces(places)

    def _places_of(self, module: str) -> Sequence[Place] | None:
        """Returns where the rows of a module lie, also of gate and up in one; None: there is none of that name."""
        if module in self.places or not module.endswith("gate_up_proj"):
            return self.places.get(module)
        start = module.removesuffix("gate_up_proj")
        halves = [self.places.get(f"{start}{part}_proj") for part in ("gate", "up")]
        joined: list[Place] = []
        for i, places in enumerate(halves):
            if places is None:
                return None
            for place in places:
                rows = place.shard.rows.among(2, i)
                joined.append(replace(place, shard=place.shard._replace(rows=rows)))
        return joined

    def _of_experts(self, module: str) -> ExpertPlace | None:
        """Returns which experts a module is of; None: it is of none."""
        if module in self.shared_experts:
            return self.shared_experts[module]
        match = EXPERT_MODULE.fullmatch(module)
        experts = None if match is None else self.experts_of.get(self.key_of(match["experts"]))
        if match is None or experts is None or match["name"] not in PARTS_OF:
            return None
        number = None if match["number"] is None else int(match["number"])
        if number is not None and number >= experts.layer.count:
            return None
        return ExpertPlace(experts, match["name"], number)

    def _why_not(self, module: str) -> str:
        targets = self.plan.targets
        if targets is not None and not self.plan.serves([module]):
            return f"it is none of --lora-target-modules {' '.join(sorted(targets))}"
        if _END.fullmatch(module) is not None:
            if not self.plan.ends:
                return "start the server with --lora-target-modules all, or name it there"
            return "the rows of the model's embedding are normalized"
        if ".experts." in module:
            return "no layer of the model has such an expert, or adapters of its experts are not computed"
        return "it is no linear layer of this model that takes adapters"
