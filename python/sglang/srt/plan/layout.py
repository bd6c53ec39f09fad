"""Which layouts of ranks a model can be divided over."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.errors import UserError
from sglang.srt.plan.feed_forward import Dense, MoE
from sglang.srt.plan.layer_spec import FeedForward, Matrix, Mixer
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.recurrent import GatedDelta, Mamba2
from sglang.srt.plan.weights import expert_rows


def check_layout(model: ModelDescription, ranks: RankLayout) -> None:
    """Raises UserError with what the layout does not divide, and the layouts that work."""
    problem = next(_problems(model, ranks), None)
    if problem is None:
        return
    working = [layout for layout in _layouts_like(ranks) if next(_problems(model, layout), None) is None]
    ways = [layout.flags for layout in working if layout.ep_size > 1]
    sizes = [layout.tp_size for layout in working if layout.ep_size == 1]
    ways += [f"--tp-size {_numbers(sizes)}"] if sizes else []
    raise UserError(f"{problem}; what works: {' or '.join(ways) or 'another checkpoint'}")


def _numbers(numbers: list[int]) -> str:
    """Ascending ones: "1 to 4, 6, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def next_layout(model: ModelDescription, ranks: RankLayout) -> RankLayout | None:
    """The smallest one with more ranks whose heads divide, up to four times as many, or else whose heads do not. None:
    there is none. Shares of experts' dims come before whole experts."""
    more = [layout for size in range(ranks.tp_size + 1, 4 * ranks.tp_size + 1) for layout in _with_experts(size)]
    more.sort(key=lambda layout: uneven_heads(model, layout.tp_size) is not None)  # stable
    return next((layout for layout in more if next(_problems(model, layout), None) is None), None)


def uneven_heads(model: ModelDescription, tp_size: int) -> str | None:
    """What the busiest rank has of heads that do not divide; None: all ranks have as many."""
    for mixer in dict.fromkeys(layer.mixer for layer in model.layers):
        if isinstance(mixer, GQA | MLA):
            shares = mixer.shares(tp_size)
            most, heads = shares.room, mixer.num_heads
            if most * tp_size != heads:
                whole = f", with whole KV heads ({shares.num_kv_heads})" if isinstance(mixer, GQA) else ""
                shared = f"{heads} attention heads over {tp_size} ranks{whole}"
                return f"{shared}: the busiest has {most}, the average {heads / tp_size:.1f}"
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
        yield from _mixer_problems(model, i, layer.mixer, tp_size)
        yield from _dense_problems(layer.ffn, tp_size)
    try:
        expert_rows(model, ranks)
    except UserError as error:
        yield str(error)


def _mixer_problems(model: ModelDescription, layer: int, mixer: Mixer, tp_size: int) -> Iterator[str]:
    """Heads of attention are shared out also where they do not divide, those of recurrent layers not."""
    if mixer.num_heads and tp_size > mixer.num_heads:
        yield f"--tp-size {tp_size} is more than the model's {mixer.num_heads} attention heads"
    elif isinstance(mixer, GQA):
        yield from _head_problems(model, layer, mixer, tp_size)
    elif isinstance(mixer, GatedDelta) and (mixer.key_heads % tp_size or mixer.value_heads % tp_size):
        yield f"--tp-size {tp_size} does not divide the model's {mixer.key_heads} key heads of gated delta nets"
    elif isinstance(mixer, Mamba2) and (mixer.num_heads % tp_size or mixer.num_groups % tp_size):
        yield f"--tp-size {tp_size} does not divide the model's {mixer.num_groups} groups of Mamba-2 heads"
    elif not isinstance(mixer, MLA) and mixer.num_heads % tp_size:
        yield f"--tp-size {tp_size} does not divide the model's {mixer.num_heads} attention heads"


def _head_problems(model: ModelDescription, layer: int, mixer: GQA, tp_size: int) -> Iterator[str]:
    shares = mixer.shares(tp_size)
    if mixer.qk_norm == "whole" and shares.kv_copies is None:
        heads = mixer.num_kv_heads
        yield f"--tp-size {tp_size} is no multiple of the model's {heads} KV heads, over all of which keys are normed"
    quant = model.quant_of(layer, Matrix("attn.o", ("",), 0, 0))
    group = quant.format.group[1] if quant is not None else 0
    if not group:
        return
    assert quant is not None
    columns = [shares.heads(rank).of_dims(mixer.v_head_dim).run for rank in range(tp_size)]
    if any(run.start % group for run in columns):
        yield (
            f"--tp-size {tp_size} cuts the input of the model's output projections within groups of {group} that share"
            f" scales ({quant.scheme})"
        )


def _dense_problems(ffn: FeedForward, tp_size: int) -> Iterator[str]:
    """Of a block that all ranks share by its intermediate dims."""
    try:
        if isinstance(ffn, Dense):
            ffn.room(tp_size)
        elif isinstance(ffn, MoE) and ffn.shared is not None and not ffn.fused_shared:
            ffn.shared.dense(ffn.activation).room(tp_size)
    except UserError as error:
        yield str(error)
