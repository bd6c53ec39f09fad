"""LoRA adapters of the model's linear layers: A and B of several adapters in slots, added to what a layer computes.

The layers share one `AdapterLayers`, which knows the slot of each token of the step that is being computed. Without
any, as in steps of requests without adapters, the layers do nothing more than ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from sglang.srt.configs.adapters.config import CONFIG_NAME
from sglang.srt.configs.adapters.files import AdapterFiles
from sglang.srt.errors import UserError
from sglang.srt.layers.native_adapters import AdapterWeights
from sglang.srt.layers.ops import ADD_ADAPTERS
from sglang.srt.plan.adapters import layer_matrices
from sglang.srt.plan.ranks import ShardRange

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in main memory, in the form of a slot: A and B of the linear layers that it changes, by the layer's
    number, and the ranks of all [layers, 1] int32."""

    matrices: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ranks: torch.Tensor


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


class AdapterLinear:
    """A and B of one linear layer, in slots."""

    def __init__(self, layers: AdapterLayers, number: int, shards: Sequence[ModuleRows]) -> None:
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
        begins = [sum(heights[:i]) for i in range(len(shards))]
        self.places = [Place(self, *each) for each in zip(shards, begins, numbers, strict=True)]

    def added(self, product: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns what `product` computes of x [T, K], [T, N], with B A x of each token's adapter added. In a CUDA
        graph A x is computed beside the product."""
        layers, kernels = self.layers, self.layers.kernels
        if layers.slots is None:
            return product()
        assert len(layers.slots) == len(x), f"{len(x)} rows of a step of {len(layers.slots)} tokens"
        if layers.stream is None or not torch.cuda.is_current_stream_capturing():
            low, out = kernels.shrink(x, layers.ordered, self.weights), product()
        else:
            main = torch.cuda.current_stream()
            layers.stream.wait_stream(main)
            with torch.cuda.stream(layers.stream):
                low = kernels.shrink(x, layers.ordered, self.weights)
            out = product()
            main.wait_stream(layers.stream)
        kernels.expand(low, out, layers.ordered, self.weights)
        return out

    def empty(self, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zeros in main memory in the form of a slot's A and B."""
        like = self.weights.a[0], self.weights.b[0]
        a, b = (torch.zeros(each.shape, dtype=each.dtype, pin_memory=pinned) for each in like)
        return a, b


class AdapterLayers:
    """The linear layers of a model that adapters may change, and the slots of a step's tokens."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        assert plan.adapters is not None
        self.plan, self.device, self.dtype = plan.adapters, device, dtype
        self.kernels = plan.entry(ADD_ADAPTERS)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.names = plan.description.names.with_text_names()
        self.slots: torch.Tensor | None = None
        """[T] int32, the slot of each token's adapter in the step that is computed, counted from 1; 0: none. None: no
        token has one."""
        self.ordered: Any = None
        """The tokens of that step as the kernels take them."""
        count = sum(1 for _ in layer_matrices(plan.weights))
        self.ranks = torch.zeros((count, self.plan.slots), dtype=torch.int32, device=device)
        """The largest rank of a part, by linear layer and slot; 0: the adapter leaves the layer alone."""
        self.linears: list[AdapterLinear] = []
        self.places: dict[str, list[Place]] = {}
        """Where the rows of each module lie, by its name in the checkpoint."""

    def begin_step(self, slots: torch.Tensor | None) -> None:
        """Begins a step of tokens with adapters in these slots."""
        self.slots = slots
        self.ordered = None if slots is None else self.kernels.order(slots, self.plan.slots)

    def linear(self, shards: Sequence[ModuleRows]) -> AdapterLinear | None:
        """Returns memory for the adapters of a linear layer, whose rows are these slices one below the other; None for
        one that has none."""
        if not self.plan.serves(shard.module for shard in shards):
            return None
        linear = AdapterLinear(self, len(self.linears), shards)
        self.linears.append(linear)
        for place in linear.places:
            self.places.setdefault(place.shard.module, []).append(place)
        return linear

    def read(self, files: AdapterFiles) -> HostAdapter:
        """Reads an adapter into main memory, this rank's share of it. Raises UserError if the model does not have its
        modules, they have other sizes, or a number is not finite. May run beside steps, in another thread."""
        if files.largest_rank > self.plan.rank:
            raise UserError(f"{files.folder} has rank {files.largest_rank}, above --max-lora-rank {self.plan.rank}.")
        pairs = [(self._places_of(module, files), module, pair) for module, pair in files.pairs.items()]
        if self.plan.strict:
            self._refuse_missing(files)
        pinned = self.device.type == "cuda"
        adapter = HostAdapter({}, torch.zeros((len(self.ranks), 1), dtype=torch.int32, pin_memory=pinned))
        try:
            with safe_open(files.weights, "pt") as file:  # type: ignore[no-untyped-call]
                for places, module, pair in pairs:
                    a, b = file.get_tensor(pair.a).float(), file.get_tensor(pair.b).float() * pair.scaling
                    self._put(adapter, places, module, a.to(self.dtype), b.to(self.dtype), files, pinned)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{files.weights} cannot be read: {error}.") from None
        except Exception as error:  # safetensors' own class, for a damaged file
            if isinstance(error, UserError):
                raise
            raise UserError(f"{files.weights} cannot be read: {error}.") from None
        return adapter

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Copies an adapter into a slot, counted from 1, on the current stream: steps launched later see it."""
        for number, (a, b) in adapter.matrices.items():
            weights = self.linears[number].weights
            weights.a[slot - 1].copy_(a, non_blocking=True)
            weights.b[slot - 1].copy_(b, non_blocking=True)
        self.ranks[:, slot - 1 : slot].copy_(adapter.ranks, non_blocking=True)

    def _canonical(self, module: str) -> str:
        name = self.names.canonical(f"{module}.weight").removesuffix(".weight")
        return name if name in self.places else f"model.{name}"

    def _refuse_missing(self, files: AdapterFiles) -> None:
        """Raises UserError if the adapter lacks a linear layer that its config names."""
        there = {self._canonical(module) for module in files.pairs}
        missing = next((name for name in self.places if name not in there and files.config.names(name)), None)
        if missing is not None:
            raise UserError(
                f"{files.folder}: {missing} has no lora_A and lora_B, but {CONFIG_NAME} names it in target_modules"
                " (--lora-strict-loading)."
            )

    def _places_of(self, module: str, files: AdapterFiles) -> list[Place]:
        places = self.places.get(self._canonical(module))
        if places is None:
            raise UserError(f"{files.folder}: {module} is not served: {self._why_not(module)}.")
        pair, shard = files.pairs[module], places[0].shard
        if (pair.outputs, pair.inputs) != (shard.rows.total, shard.cols.total):
            raise UserError(
                f"{files.folder}: {module} is of [{pair.outputs}, {pair.inputs}], but the model's is of"
                f" [{shard.rows.total}, {shard.cols.total}]. Was the adapter made for another model?"
            )
        return places

    def _why_not(self, module: str) -> str:
        if not self.plan.serves([module]):
            return f"it is none of --lora-target-modules {' '.join(sorted(self.plan.targets or ()))}"
        if ".experts." in module or module.endswith(".experts"):
            return "adapters of experts are not computed"
        if ".shared_expert" in module:
            return "the shared expert is computed as one more routed one; start with --disable-shared-experts-fusion"
        if module.endswith(("embed_tokens", "lm_head", "unembed_tokens")):
            return "adapters of the embedding and of the output head are not computed"
        return "it is no linear layer of this model that takes adapters"

    def _put(
        self,
        adapter: HostAdapter,
        places: Sequence[Place],
        module: str,
        a: torch.Tensor,
        b: torch.Tensor,
        files: AdapterFiles,
        pinned: bool,
    ) -> None:
        if not (a.isfinite().all() and b.isfinite().all()):
            raise UserError(f"{files.folder}: {module} has a number that is not finite in {self.dtype}.")
        rank = len(a)
        for place in places:
            number, shard = place.linear.number, place.shard
            if number not in adapter.matrices:
                adapter.matrices[number] = place.linear.empty(pinned)
            whole_a, whole_b = adapter.matrices[number]
            whole_a[place.part, :rank, : shard.cols.count] = a[:, shard.cols.run]
            whole_b[place.begin : place.begin + shard.rows.count, :rank] = b[shard.rows.run]
            adapter.ranks[number, 0] = max(int(adapter.ranks[number, 0]), rank)
