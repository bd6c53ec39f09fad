"""Which layouts of ranks a model can be divided over."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.errors import UserError
from sglang.srt.plan.feed_forward import Dense, MoE
from sglang.srt.plan.layer_spec import FeedForward, Matrix
from sglang.srt.plan.mixers import GQA
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.recurrent import GatedDelta
from sglang.srt.plan.weights import expert_rows


def check_layout(model: ModelDescription, ranks: RankLayout) -> None:
    """Raises UserError with what the layout does not divide, and the layouts that work."""
    problem = next(_problems(model, ranks), None)
    if problem is None:
        return
    working = [layout for layout in _layouts_like(ranks) if next(_problems(model, layout), None) is None]
    ways = [layout.flags for layout in working if layout.ep_size > 1]
    sizes = [str(layout.tp_size) for layout in working if layout.ep_size == 1]
    ways += [f"--tp-size {', '.join(sizes)}"] if sizes else []
    raise UserError(f"{problem}; what works: {' or '.join(ways) or 'another checkpoint'}")


def next_layout(model: ModelDescription, ranks: RankLayout) -> RankLayout | None:
    """The smallest one with more ranks, up to four times as many; None if there is none. Shares of experts' dims come
    before whole experts."""
    for size in range(ranks.tp_size + 1, 4 * ranks.tp_size + 1):
        for layout in _with_experts(size):
            if next(_problems(model, layout), None) is None:
                return layout
    return None


def _layouts_like(ranks: RankLayout) -> Iterator[RankLayout]:
    """Other ways to share the experts, and other numbers of ranks, up to twice as many."""
    if ranks.tp_size % ranks.ep_size:
        yield RankLayout(-(-ranks.tp_size // ranks.ep_size) * ranks.ep_size, ranks.ep_size)
    yield from (layout for layout in _with_experts(ranks.tp_size) if layout.ep_size > 1)
    yield from (RankLayout(size) for size in range(1, 2 * ranks.tp_size + 1))


def _with_experts(tp_size: int) -> Iterator[RankLayout]:
    return (RankLayout(tp_size, ep_size) for ep_size in range(1, tp_size + 1) if tp_size % ep_size == 0)


def _problems(model: ModelDescription, ranks: RankLayout) -> Iterator[str]:
    tp_size, ep_size, experts = ranks.tp_size, ranks.ep_size, model.experts
    if tp_size % ep_size:
        yield f"--ep-size {ep_size} does not divide --tp-size {tp_size}, whose ranks share the experts"
    if ep_size > 1 and experts is None:
        yield f"--ep-size {ep_size} shares out experts, and the model has none"
    if experts is not None and ep_size > experts.num_experts:
        yield f"--ep-size {ep_size} is more than the model's {experts.num_experts} experts"
    for i, layer in enumerate(model.layers):
        mixer, ffn = layer.mixer, layer.ffn
        if mixer.num_heads % tp_size:
            yield f"--tp-size {tp_size} does not divide the model's {mixer.num_heads} attention heads"
        if isinstance(mixer, GQA) and mixer.num_kv_heads % tp_size and tp_size % mixer.num_kv_heads:
            heads = mixer.num_kv_heads
            yield f"--tp-size {tp_size} neither divides nor is a multiple of the model's {heads} KV heads"
        if isinstance(mixer, GatedDelta) and mixer.key_heads % tp_size:
            yield f"--tp-size {tp_size} does not divide the model's {mixer.key_heads} key heads of gated delta nets"
        yield from _dense_problems(model, i, ffn, tp_size)
    try:
        expert_rows(model, ranks)
    except UserError as error:
        yield str(error)


def _dense_problems(model: ModelDescription, layer: int, ffn: FeedForward, tp_size: int) -> Iterator[str]:
    """Of a block that all ranks share by its intermediate dims."""
    if isinstance(ffn, Dense):
        name, module, size = "intermediate size", "mlp.down", ffn.intermediate_size
    elif isinstance(ffn, MoE) and ffn.shared is not None and not ffn.fused_shared:
        name, module = "shared expert's intermediate size", "moe.shared.down"
        size = ffn.shared.intermediate_size
    else:
        return
    if size % tp_size:
        yield f"--tp-size {tp_size} does not divide the model's {name} {size}"
        return
    quant = model.quant_of(layer, Matrix(module, ("down",), model.hidden_size, size))
    group = quant.format.group[1] if quant is not None else 0
    if group and tp_size > 1 and size // tp_size % group:
        assert quant is not None
        yield (
            f"--tp-size {tp_size} cuts the model's {name} {size} within groups of {group} that share scales"
            f" ({quant.scheme})"
        )
