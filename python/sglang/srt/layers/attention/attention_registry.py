"""From the plan's choices to an attention backend object, and the hook for backends from outside this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.layers.forward_batch import AttentionBackend

if TYPE_CHECKING:
    import torch

    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.plan import Plan

BackendFactory = Callable[["Plan", str], AttentionBackend]
_Factory = TypeVar("_Factory", bound=BackendFactory)

PLUGIN_BACKENDS: dict[str, BackendFactory] = {}


def register_attention_backend(name: str) -> Callable[[_Factory], _Factory]:
    """Decorator for a backend class (or factory) taking (plan, device); it replaces a built-in of the same name."""

    def register(factory: _Factory) -> _Factory:
        if name in PLUGIN_BACKENDS:
            raise ValueError(f"attention backend {name!r} is registered twice")
        PLUGIN_BACKENDS[name] = factory
        return factory

    return register


def create_attention_backend(plan: Plan) -> AttentionBackend:
    """The backend that the plan chose; two of them behind one face when prefill and decode differ."""
    extend_name = plan.choices["extend_attention"].name
    decode_name = plan.choices["decode_attention"].name
    extend = _create(plan, "extend_attention")
    if extend_name == decode_name:
        return extend
    return HybridAttnBackend(extend, _create(plan, "decode_attention"))


def _create(plan: Plan, op: str) -> AttentionBackend:
    choice = plan.choices[op]
    factory: BackendFactory = PLUGIN_BACKENDS[choice.name] if choice.name in PLUGIN_BACKENDS else choice.load()
    return factory(plan, plan.device)


class HybridAttnBackend:
    """Implements AttentionBackend: one backend for new tokens over a prefix, another one for decoding."""

    def __init__(self, extend: AttentionBackend, decode: AttentionBackend) -> None:
        self.extend = extend
        self.decode = decode

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        (self.decode if batch.forward_mode.is_decode() else self.extend).init_forward_metadata(batch)

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        self.decode.init_cuda_graph_state(batch_sizes)

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        self.decode.init_forward_metadata_capture(batch)

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        self.decode.init_forward_metadata_replay(batch, num_reqs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        self.extend.forward_extend(q, k, v, layer, batch, out)

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.decode.forward_decode(q, layer, batch, out)
