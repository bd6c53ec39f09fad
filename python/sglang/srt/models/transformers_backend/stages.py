"""Divides the layers of a class into the stages of a pipeline, where the class's own plan for it says that only the
residual stream passes from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.plan.transformers_backend.facts import StagesFact, TensorFact

_LAYERS, _HIDDEN = "layers", "hidden_states"
"""Names of transformers' plans: of the list of layers, and of the argument that is the residual stream."""


def _plan_of(decoder: Any) -> Mapping[str, Any]:
    """Returns the modules of a decoder in the order in which stages compute them; empty if the class has no plan."""
    plan: Mapping[str, Any] = getattr(decoder.config, "base_model_pp_plan", None) or {}
    return plan if isinstance(getattr(decoder, _LAYERS, None), torch.nn.ModuleList) and _LAYERS in plan else {}


@dataclass(slots=True)
class LayerCalls:
    """What the layers of a class take and return in a run without weights, in order."""

    calls: list[tuple[list[Any], Any]] = field(default_factory=list)
    _removals: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, decoder: Any) -> None:
        """Records the calls of a decoder's layers until `end`, if the class has a plan for stages."""
        for layer in decoder.layers if _plan_of(decoder) else ():
            self._removals.append(layer.register_forward_hook(self._record, with_kwargs=True).remove)

    def end(self) -> None:
        """Records no more calls."""
        for remove in self._removals:
            remove()

    def _record(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.calls.append(([*args, *kwargs.values()], out))

    def stages(self, decoder: Any, hidden: torch.Tensor, path: str, outside: Sequence[TensorFact]) -> StagesFact | None:
        """Returns how stages divide the layers; None where the class has no plan, or where more than the residual
        stream passes between them. hidden: the decoder's output; path: what the decoder's names begin with;
        outside: tensors outside of layers."""
        plan = _plan_of(decoder)
        if not plan or len(self.calls) != len(decoder.layers):
            return None
        norm = f"{path}{[*plan][-1]}"
        if not all(tensor.name.startswith(f"{norm}.") for tensor in outside):
            return None
        values = {len(out) if isinstance(out, tuple) else 0 for _, out in self.calls}
        streams = [out[0] if isinstance(out, tuple) else out for _, out in self.calls]
        given = [sum(_is_like(value, hidden) for value in arguments) for arguments, _ in self.calls]
        if len(values) > 1 or set(given) != {1} or not all(_is_like(stream, hidden) for stream in streams):
            return None
        return StagesFact(norm, values.pop())


def _is_like(value: Any, hidden: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == hidden.shape and value.dtype == hidden.dtype


class StageOfClass:
    """The layers of a class that a stage computes. The others hand on what they get, the first one begins with what the
    stage received, and the last one's output is what the stage sends."""

    def __init__(self, layers: Sequence[Any], here: Sequence[bool], norm: Any, fact: StagesFact) -> None:
        """here: which of the layers the stage has. norm: what follows the last layer."""
        self.received: torch.Tensor | None = None
        """Output [1, T, H] of the stage before."""
        self.sent: torch.Tensor | None = None
        self._values = fact.values
        numbers = [number for number, has in enumerate(here) if has]
        first, last = numbers[0], numbers[-1]
        for number, layer in enumerate(layers):
            if not here[number]:
                layer.forward = self._hand_on
        if first > 0:
            layers[first].forward = self._begun(layers[first].forward)
        if last + 1 < len(layers):
            layers[last].forward = self._ended(layers[last].forward)
            norm.forward = _hand_back

    def take(self) -> torch.Tensor:
        """Returns the output [1, T, H] of the stage's last layer, which is not the model's."""
        sent, self.sent = self.sent, None
        assert sent is not None, "the decoder has just been computed"
        return sent

    def _hand_on(self, *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else kwargs[_HIDDEN]
        return (stream, *(None,) * (self._values - 1)) if self._values else stream

    def _begun(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            if args:
                return forward(self.received, *args[1:], **kwargs)
            return forward(**{**kwargs, _HIDDEN: self.received})

        return begin

    def _ended(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def end(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            self.sent = out[0] if isinstance(out, tuple) else out
            return out

        return end


def _hand_back(stream: torch.Tensor) -> torch.Tensor:
    return stream
