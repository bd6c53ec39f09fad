"""Cuts a model into pipeline stages by the bytes of the layers' weights. No torch.

A stage is a ModelDescription in which the other stages' layers have no blocks. So everything that follows from a
description (weights, caches, the model itself) follows for a stage, too, and layers keep their numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sglang.srt.plan.caches import CacheGroup
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.weights import rank_weight_bytes


@dataclass(frozen=True, slots=True)
class Behind:
    """What only the last stage has besides the model: a draft's layers, and the bytes of its weights."""

    layers: int = 0
    weight_bytes: int = 0


NO_EXTRAS = Behind()


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its `layers` of the model, and the bytes of weights on each of its ranks, embedding and
    output head included. `behind`: number of further layers (a draft's) that have caches."""

    layers: range
    model: ModelDescription
    weight_bytes: int
    behind: int = 0

    @property
    def cache_layers(self) -> range:
        return range(self.layers.start, self.layers.stop + self.behind)

    def __str__(self) -> str:
        ends = ["embedding"] * self.model.has_embedding + ["output head"] * self.model.last_stage
        parts = [f"layers {self.layers[0]} to {self.layers[-1]}", *ends]
        return f"{' and '.join(parts)}: {self.weight_bytes / 1024**3:.2f} GiB of weights a GPU"


def cut_stages(
    of_rank: RankWeights,
    dtype: str,
    fp8_cache: bool = False,
    features: Collection[str] | None = None,
    behind: Behind = NO_EXTRAS,
) -> tuple[Stage, ...]:
    """Cuts the model into stages such that the largest has as few bytes of weights as possible; arguments as in
    `rank_weight_bytes`. There must be at least as many `uncut_runs` as stages."""
    model, num_layers = of_rank.model, len(of_rank.model.layers)

    def of(layers: range) -> Stage:
        part, after = stage_model(model, layers), behind if layers.stop == num_layers else NO_EXTRAS
        size = rank_weight_bytes(of_rank.select_stage(part), dtype, fp8_cache, features) + after.weight_bytes
        return Stage(layers, part, size, after.layers)

    if of_rank.ranks.pp_size == 1:
        return (of(range(len(model.layers))),)
    runs = uncut_runs(model)
    cuts = balanced_runs([of(layers).weight_bytes for layers in runs], of_rank.ranks.pp_size)
    return tuple(of(range(runs[cut.start].start, runs[cut.stop - 1].stop)) for cut in cuts)


def uncut_runs(model: ModelDescription) -> list[range]:
    """Returns the runs of layers that must stay in one stage: a layer that takes an earlier layer's selection, or reads
    entries that it made, stays with it."""
    takes = [layer.mixer.follows_layer for layer in model.layers]
    starts = [i for i, taken in enumerate(takes) if not taken]
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(takes)])]


def stage_model(model: ModelDescription, layers: range) -> ModelDescription:
    """Returns the model with these layers only; with the embedding if the first layer is among them, and with the head
    if the last is."""
    if len(layers) == len(model.layers):
        return model
    names, first, last = model.names, layers.start == 0, layers.stop == len(model.layers)
    others = [i for i in range(len(model.layers)) if i not in layers]
    unread = [names.layer_prefix.format(layer=i) for i in others]
    embedding = [f"{names.model[name]}." for name in ("embed", "embed_norm") if name in names.model]
    unread += embedding if not first and not (last and model.tie_embeddings) else []
    unread += [*(f"{names.model[name]}." for name in ("norm", "lm_head")), *names.behind] if not last else []
    cut = [layer if i in layers else LayerSpec(ABSENT, ABSENT, layer.residual) for i, layer in enumerate(model.layers)]
    return replace(
        model,
        layers=tuple(cut),
        first_stage=first,
        last_stage=last,
        names=replace(names, unread=(*names.unread, *unread)),
    )


def balanced_runs(weights: Sequence[int], count: int) -> list[range]:
    """Cuts `weights` into `count` runs, none empty, whose heaviest is as light as possible.

    Example: [5, 1, 1, 1, 5] into three: [5], [1, 1, 1], [5].
    """
    ends = list(itertools.accumulate(weights, initial=0))
    num = len(weights)
    assert 0 < count <= num, f"{num} layers cannot be cut into {count} stages"
    # heaviest[i] is the heaviest run when the first i weights are cut into `runs`; begin[i] is the last run's start.
    heaviest = [float("inf") if i == 0 else float(ends[i]) for i in range(num + 1)]
    cuts: list[list[int]] = []
    for runs in range(2, count + 1):
        begin = [0] * (num + 1)
        following = [float("inf")] * (num + 1)
        for i in range(runs, num + 1):
            begin[i] = min(range(runs - 1, i), key=lambda j: (max(heaviest[j], ends[i] - ends[j]), j))
            following[i] = max(heaviest[begin[i]], ends[i] - ends[begin[i]])
        heaviest = following
        cuts.append(begin)
    stops = [num]
    for begin in reversed(cuts):
        stops.insert(0, begin[stops[0]])
    return [range(start, stop) for start, stop in itertools.pairwise([0, *stops])]


def caches_of_stage(groups: Sequence[CacheGroup], layers: range) -> tuple[CacheGroup, ...]:
    """Returns the groups with only the caches of these layers. Groups without any stay: every rank's scheduler needs
    the same groups."""
    return tuple(
        replace(group, members=tuple(member for member in group.members if member.layer_id in layers))
        for group in groups
    )


def fullest_caches(groups: Sequence[CacheGroup], stages: Sequence[Stage]) -> tuple[CacheGroup, ...]:
    """Returns for each group the caches of the stage that has the most bytes of it."""
    parts = [caches_of_stage(groups, stage.cache_layers) for stage in stages]
    return tuple(max(same, key=lambda group: group.bytes_per_entry) for same in zip(*parts, strict=True))
