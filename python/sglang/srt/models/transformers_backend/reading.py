"""Reads the facts of a model class from the model without weights and the calls of its run."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from transformers.integrations.moe import _default_apply_gate

from sglang.srt.models.transformers_backend.calls import HARMLESS, TOKENS, AttentionCall, Calls, ExpertsCall
from sglang.srt.models.transformers_backend.checkpoint_names import experts_of
from sglang.srt.models.transformers_backend.mixing import Convolutions
from sglang.srt.models.transformers_backend.norms import NormFinder
from sglang.srt.plan.transformers_backend.facts import AttentionFact, ExpertsFact, LayerFact, LinearFact, TensorFact

_LAYER = re.compile(r"(.*?\.?)(\d+)\.(.+)")
_LAYER_NUMBER = "{layer}"


class Refused(Exception):
    """Raised where a class cannot be served; the message says why."""


def run(decoder: Any, **more: Any) -> torch.Tensor:
    """Runs what is below the head of a model without weights, and returns its output [1, T, C]."""
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(TOKENS, device="meta")[None]
    with torch.no_grad(), Convolutions() as convolutions:
        hidden: torch.Tensor = decoder(input_ids=ids, position_ids=positions, use_cache=False, **more)[0]
    if convolutions.mixes:
        raise Refused("a convolution mixes neighbouring tokens, which may belong to other requests")
    if hidden.dim() != 3 or hidden.shape[:2] != (1, TOKENS):
        raise Refused(f"its decoder returns {list(hidden.shape)} for {TOKENS} tokens")
    return hidden


class Reading:
    """A model without weights, whose run has been recorded. Raises Refused where something is not computed here."""

    def __init__(self, model: Any, calls: Calls, generates: bool = True) -> None:
        """generates: it is a causal language model; others may attend to both sides, over no cache."""
        self.model, self.calls, self.generates = model, calls, generates
        self.names = {id(module): path for path, module in model.named_modules()}
        """Path of each module."""
        self.layers_at = self._layers_at()
        self.experts = {self._number(call.module): call for call in calls.experts}
        self._stored_apart = experts_of(model)
        self._linears: list[list[LinearFact]] = [[] for _ in calls.attention]
        self._tensors: list[list[TensorFact]] = [[] for _ in calls.attention]
        self.outside: list[TensorFact] = []
        """Tensors outside of layers."""
        self._norms = NormFinder()
        self._kernels_rotate = generates and calls.rotations.replaceable(model)
        self._collect()

    def layer(self, number: int) -> LayerFact:
        """Returns the facts of a layer."""
        routed = self.experts.get(number)
        return LayerFact(
            self._attention(number, self.calls.attention[number]),
            tuple(self._linears[number]),
            tuple(self._tensors[number]),
            None if routed is None else self._experts(number, routed),
        )

    def _layers_at(self) -> str:
        """Returns what the names of layers begin with. Refuses a class that does not attend once in each of its layers,
        in order."""
        if not self.calls.attention:
            raise Refused("its class does not call attention")
        matches = [_LAYER.fullmatch(self.names[id(call.module)]) for call in self.calls.attention]
        places = Counter(match.group(1) if match else "" for match in matches)
        numbers = [int(match.group(2)) if match else -1 for match in matches]
        if len(places) > 1 or numbers != list(range(len(numbers))):
            raise Refused("its class does not attend once in each layer, one after the other")
        return f"{next(iter(places))}{_LAYER_NUMBER}."

    def _number(self, module: Any) -> int:
        match = _LAYER.fullmatch(self.names[id(module)])
        assert match is not None, "experts are in layers"
        return int(match.group(2))

    def _in_layer(self, number: int, module: Any) -> str:
        return self.names[id(module)].removeprefix(self.layers_at.format(layer=number))

    def _attention(self, number: int, call: AttentionCall) -> AttentionFact:
        arguments, module = call.arguments, self._in_layer(number, call.module)
        unknown = [name for name, value in arguments.items() if name not in HARMLESS and not isinstance(value, bool)]
        if unknown:
            raise Refused(f"its attention is called with {', '.join(sorted(unknown))}, which nothing computes here")
        is_causal = arguments.get("is_causal") is not False and getattr(call.module, "is_causal", True) is not False
        if self.generates and not is_causal:
            raise Refused("its attention is not causal")
        if not call.query[2] == call.key[2] == call.value[2] == TOKENS or call.query[0] != 1:
            raise Refused("its queries and keys are not those of the same tokens")
        sinks, cap = _sinks(call, module), float(arguments.get("softcap") or 0.0)
        if not self.generates and (sinks or cap):
            raise Refused("its attention has caps or learned logits, which are only computed over a cache")
        causal = True
        try:
            if self.generates:
                window = self.calls.window_of(call)
            else:
                causal, window = self.calls.sight_of(call, is_causal)
        except ValueError as reason:
            raise Refused(str(reason)) from None
        return AttentionFact(
            module,
            num_heads=call.query[1],
            num_kv_heads=call.key[1],
            head_dim=call.query[3],
            v_head_dim=call.value[3],
            scale=float(arguments.get("scaling") or call.query[3] ** -0.5),
            window=window,
            logit_cap=cap,
            sinks=sinks,
            causal=causal,
            rotary_dim=call.rotary_dim if self._kernels_rotate else 0,
        )

    def _experts(self, number: int, call: ExpertsCall) -> ExpertsFact:
        """Reads how a class computes its experts. Refuses what our kernels do not compute."""
        module: Any = call.module
        name = self._in_layer(number, module)
        if not module.has_gate or type(module)._apply_gate is not _default_apply_gate:
            raise Refused("its experts have a function of their own")
        if getattr(module, "has_post_expert_norm", False):
            raise Refused("its experts' outputs are normed")
        if not module.is_concatenated:
            raise Refused("its experts' gates and inputs alternate")
        parts = next((parts for end, parts in self._stored_apart.items() if f".{name}".endswith(f".{end}")), ())
        stored = "columns" if module.is_transposed else "stacked"
        return ExpertsFact(
            name,
            num_experts=module.down_proj.shape[0],
            intermediate_size=module.down_proj.shape[1 if module.is_transposed else 2],
            top_k=call.top_k,
            function=_function_of(module.act_fn),
            form="" if parts else stored,
            bias=bool(module.has_bias),
            apart=f"{name}.{{expert}}.{{part}}" if parts else "",
            parts=parts,
        )

    def _collect(self) -> None:
        """Collects products and other tensors by layer."""
        stem, plan = self.layers_at.partition(_LAYER_NUMBER)[0], self.model.tp_plan or {}
        in_experts = {self.names[id(call.module)] for call in self.experts.values()}
        for path, module in self.model.named_modules(remove_duplicate=False):
            number, inner = _split(path, stem)
            if number >= len(self._linears):
                raise Refused("some of its layers do not attend")
            style = _style(plan, path)
            if number >= 0 and type(module) is torch.nn.Linear:
                bias = module.bias is not None
                self._linears[number].append(LinearFact(inner, module.out_features, module.in_features, bias, style))
            elif path not in in_experts:
                tensors = self.outside if number < 0 else self._tensors[number]
                for leaf, tensor in _stored(module):
                    name = f"{path}.{leaf}".removeprefix(".")
                    fact = f"{inner}.{leaf}".removeprefix(".")
                    own_style, norm = _style(plan, name) or style, self._norms.norm_of(module)
                    fp32 = _keeps_fp32(self.model, name) or (norm is not None and norm.plus_one)
                    tensors.append(TensorFact(fact, tuple(tensor.shape), fp32, own_style, norm))


def _split(path: str, stem: str) -> tuple[int, str]:
    """Returns the layer of a module and its path there; -1 and the whole path outside of layers."""
    number, _, inner = path.removeprefix(stem).partition(".")
    return (int(number), inner) if path.startswith(stem) and number.isdigit() else (-1, path)


def _style(plan: dict[str, str], name: str) -> str:
    """Returns how a class's plan divides a module or a parameter over ranks; "": it does not name it."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


def _stored(module: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the module's own parameters and the buffers that checkpoints have."""
    passing = module._non_persistent_buffers_set
    buffers = [(name, buffer) for name, buffer in module._buffers.items() if name not in passing]
    return [(name, tensor) for name, tensor in (*module._parameters.items(), *buffers) if tensor is not None]


def _keeps_fp32(model: Any, name: str) -> bool:
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){module}($|\.)", name) for module in strict)


def _sinks(call: AttentionCall, module: str) -> str:
    """Returns the name of the learned logits that a call passes, in its layer; "" without any."""
    logits = call.arguments.get("s_aux")
    if logits is None:
        return ""
    names = [path for path, parameter in call.module.named_parameters() if parameter is logits]
    if not names:
        raise Refused("the learned logits of its attention are computed")
    return f"{module}.{names[0]}"


def _function_of(function: Any) -> str:
    """Returns the name of an activation, which is known by its values."""
    points = torch.linspace(-6, 6, 97)
    known = {
        "silu": torch.nn.functional.silu(points),
        "gelu_pytorch_tanh": torch.nn.functional.gelu(points, approximate="tanh"),
    }
    with suppress(Exception):  # it may have parameters, which have no values here
        values = function(points)
        for name, expected in known.items():
            if torch.allclose(values, expected, atol=1e-6):
                return name
    raise Refused("its experts have an activation that is not computed here")
