"""Which numbers of tensor-parallel ranks a model can be divided over."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.errors import UserError
from sglang.srt.plan.feed_forward import Dense, MoE
from sglang.srt.plan.mixers import GQA
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.recurrent import GatedDelta
from sglang.srt.plan.weights import expert_rows


def check_layout(model: ModelDescription, tp_size: int) -> None:
    """Raises UserError with what --tp-size does not divide, and the sizes that work."""
    problem = next(_problems(model, tp_size), None)
    if problem is None:
        return
    working = [size for size in range(1, 2 * tp_size + 1) if next(_problems(model, size), None) is None]
    choice = f"--tp-size {', '.join(map(str, working))}" if working else "another checkpoint"
    raise UserError(f"{problem}; what works: {choice}")


def next_layout(model: ModelDescription, tp_size: int) -> int | None:
    """The smallest larger number of ranks, up to four times as many; None if there is none."""
    sizes = range(tp_size + 1, 4 * tp_size + 1)
    return next((size for size in sizes if next(_problems(model, size), None) is None), None)


def _problems(model: ModelDescription, tp_size: int) -> Iterator[str]:
    for layer in dict.fromkeys(model.layers):
        mixer, ffn = layer.mixer, layer.ffn
        if mixer.num_heads % tp_size:
            yield f"--tp-size {tp_size} does not divide the model's {mixer.num_heads} attention heads"
        if isinstance(mixer, GQA) and mixer.num_kv_heads % tp_size and tp_size % mixer.num_kv_heads:
            heads = mixer.num_kv_heads
            yield f"--tp-size {tp_size} neither divides nor is a multiple of the model's {heads} KV heads"
        if isinstance(mixer, GatedDelta) and mixer.key_heads % tp_size:
            yield f"--tp-size {tp_size} does not divide the model's {mixer.key_heads} key heads of gated delta nets"
        sizes: list[tuple[str, int]] = []
        if isinstance(ffn, Dense):
            sizes = [("intermediate size", ffn.intermediate_size)]
        elif isinstance(ffn, MoE) and ffn.shared is not None and not ffn.fused_shared:
            sizes = [("shared expert's intermediate size", ffn.shared.intermediate_size)]
        for name, size in sizes:
            if size % tp_size:
                yield f"--tp-size {tp_size} does not divide the model's {name} {size}"
    try:
        expert_rows(model, tp_size)
    except UserError as error:
        yield str(error)
