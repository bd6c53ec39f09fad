"""Feed-forward blocks that many families share, read from the usual keys: MLPs, experts, and which layers have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import SCORES, MoE, Router, Shared
from sglang.srt.configs.activation import FUNCTIONS, SILU, SILU_FUNCTION, Activation
from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Keys with the number of routed experts."""


def activation(c: Config, usual: Activation = SILU, names: Collection[str] = tuple(FUNCTIONS)) -> Activation:
    """Returns the activation of the feed-forward blocks: `usual`, with the function and limits that the keys state. A
    function whose name is none of `names` is noted as a problem."""
    for key in ("hidden_act", "hidden_activation"):
        c.only(key, *names)
    name = c.values.get("hidden_act") or c.values.get("hidden_activation")
    function = FUNCTIONS.get(str(name), SILU_FUNCTION) if name else usual.function
    limit = c.default("swiglu_limit", float, usual.limit or 0.0)
    return replace(usual, function=function, alpha=c.default("swiglu_alpha", float, usual.alpha), limit=limit or None)


def mlp(c: Config, function: Activation | None = None, **facts: Any) -> Dense:
    """Returns the MLP of layers without experts. `facts`: further fields of Dense."""
    size = c.count("dense_intermediate_size", "intermediate_size_mlp") or c.positive("intermediate_size")
    return Dense(size, c.default("mlp_bias", bool, False), function or activation(c), **facts)


def experts(
    c: Config, router: Router, function: Activation | None = None, *, shared: Shared | None = None, **facts: Any
) -> MoE:
    """Returns the experts. `router`: what the keys leave out of it; `facts`: further fields of MoE. Routing that is
    impossible is noted as a problem. Raises UserError."""
    number = c.count(*EXPERT_COUNTS) or c.positive("num_experts")
    ungrouped = c.values.get("topk_method") == "greedy"
    router = replace(
        router,
        top_k=c.count("num_experts_per_tok", "experts_per_token", "top_k_experts"),
        score=_score(c, router),
        renormalize=c.default("norm_topk_prob", bool, router.renormalize),
        scale=c.default("routed_scaling_factor", float, router.scale),
        num_groups=1 if ungrouped else c.count("n_group") or 1,
        top_groups=1 if ungrouped else c.count("topk_group") or 1,
    )
    for what in router.problems(number):
        c.problem(f"impossible routing: {what}")
    return MoE(number, expert_size(c), router, function or activation(c), shared=shared, **facts)


def expert_size(c: Config) -> int:
    """Returns the intermediate size of a routed expert."""
    return c.count("moe_intermediate_size") or c.positive("intermediate_size")


def _score(c: Config, router: Router) -> str:
    score = c.values.get("scoring_func") or router.score
    if score not in SCORES:
        raise UserError(f"{c.source}: 'scoring_func' must be one of {', '.join(SCORES)}; got {score!r}.")
    return str(score)


def shared_experts(c: Config) -> Shared | None:
    """Returns the shared expert of DeepSeek's form: as wide as a number of routed experts together."""
    number = c.count("n_shared_experts", "num_shared_experts")
    return Shared(number * expert_size(c)) if number else None


def gated_shared_expert(c: Config) -> Shared | None:
    """Returns the shared expert of Qwen's form, which a gate weights."""
    size = c.count("shared_expert_intermediate_size")
    return Shared(size, gated=True) if size else None


def sparse_layers(c: Config, first_dense: int = 0) -> list[bool]:
    """Returns whether each layer has experts: every `decoder_sparse_step`-th from `first_k_dense_replace` on, without
    those of `mlp_only_layers`; or as `mlp_layer_types` says. `first_dense`: number of layers without experts before the
    others, where no key says which. Raises UserError."""
    step, first = c.positive("decoder_sparse_step", 1), c.count("first_k_dense_replace")
    dense, kinds = c.default("mlp_only_layers", list, []), c.by_layer("mlp_layer_types", "sparse")
    if not any(c.values.get(key) for key in _DENSE_KEYS):
        first = first_dense
    return [kind != "dense" and i >= first and i not in dense and (i + 1) % step == 0 for i, kind in enumerate(kinds)]


_DENSE_KEYS = ("mlp_layer_types", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")


def flagged_layers(c: Config) -> list[bool]:
    """Returns whether each layer has experts, by the list of 0 and 1 in `moe_layer_freq`, or else by the usual keys."""
    return c.flags("moe_layer_freq") if isinstance(c.values.get("moe_layer_freq"), list) else sparse_layers(c)


def listed_layers(c: Config, key: str, listed: Any) -> list[bool]:
    """Returns whether each layer is among those listed: "3,4,5", or numbers. Raises UserError that names `key`."""
    items = listed.split(",") if isinstance(listed, str) else listed
    numbers = [str(item).strip() for item in items] if isinstance(items, list) else [""]
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise UserError(f"{c.source}: {key!r} must be a list of layers' numbers; got {listed!r:.200}.")
    return [i in set(map(int, numbers)) for i in range(c.num_layers)]


def ffn_by_layer(sparse: Sequence[bool], dense: Callable[[], Dense], moe: Callable[[], MoE]) -> list[Dense | MoE]:
    """Returns the block of each layer, by whether it has experts. A kind that no layer has is not read."""
    by_kind: dict[bool, Callable[[], Dense | MoE]] = {True: moe, False: dense}
    blocks = {kind: by_kind[kind]() for kind in dict.fromkeys(sparse)}
    return [blocks[kind] for kind in sparse]
