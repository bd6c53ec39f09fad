"""A causal model whose code is a class of transformers, over our attention, caches, products, experts and head."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.transformers_layer.layer import (
    ClassNorm,
    CurrentStep,
    LayerAttention,
    RoutedExperts,
    TransformersLinear,
    attend,
    compute_experts,
)
from sglang.srt.blocks.transformers_layer.rotation import AnglesOfStep, deferred
from sglang.srt.blocks.transformers_layer.spec import TransformersExperts, TransformersLayer
from sglang.srt.distributed.groups import Groups
from sglang.srt.distributed.ping_pong import Blocks, PingPong
from sglang.srt.layers.embedding import LMHead, VocabParallelEmbedding
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.ops import RMSNORM
from sglang.srt.layers.parameter import Init, Scope
from sglang.srt.layers.quantization.layout import is_redundant
from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.models.causal_lm import AuxLayers, CausalLM
from sglang.srt.models.transformers_backend.buffers import fill_buffers
from sglang.srt.models.transformers_backend.build import class_of, config_of, create, register
from sglang.srt.models.transformers_backend.head import Given, decoder_of
from sglang.srt.models.transformers_backend.rotations import FUNCTION, modules_with_rotation
from sglang.srt.models.transformers_backend.stages import StageOfClass
from sglang.srt.plan.transformers_backend.facts import HeadFact, TensorFact

if TYPE_CHECKING:
    from sglang.srt.blocks.transformers_layer.text_attention import TextAttention
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.row_exchange import RowExchange
    from sglang.srt.plan.plan import Plan


class TransformersModel(CausalLM):
    """A causal model of transformers, used as others are: the class computes the tokens of a step as one
    text [1, T] with positions by request, and calls our functions for what requests have in common and for what they
    do not.
    """

    def __init__(self, plan: Plan, device: torch.device | str | None = None, groups: Groups | None = None) -> None:
        """Allocates the parameters; arguments as in CausalLM."""
        scope = self._begin(plan, device, groups)
        description, code = self.description, self.description.transformers_class
        assert code is not None
        self.facts, facts = code.facts, code.facts
        self.base_prefix = facts.base
        self.vocab_is_in_group, self.defers_all_reduce = True, False
        self.layers = []  # the class has its layers to itself
        self.aux_layers, self.aux_keeps_streams = AuxLayers(), False
        self.step = CurrentStep()
        register(attend, compute_experts)
        kind = class_of(code.request)
        self.model = create(kind, config_of(code.request, kind), scope.dtype, code.request.task)
        self.embed = None
        if description.has_embedding:
            self.embed = VocabParallelEmbedding(scope.sub("embed"), facts.vocab_size, description.hidden_size)
        self.head = None
        if any(layer.attention.rotary_dim for layer in facts.layers):
            for code_of_class in modules_with_rotation(self.model):
                setattr(code_of_class, FUNCTION, deferred(getattr(code_of_class, FUNCTION)))
        rotary = RotaryTables(plan.num_positions, plan.context_len, scope.device)
        for i, layer in enumerate(description.layers):
            if isinstance(layer.mixer, TransformersLayer):
                self._fill_layer(scope.sub("layers").sub(i), layer.mixer, layer.ffn.experts, i, rotary)
        if description.first_stage:
            assert self.embed is not None
            self.embedding = TransformersEmbedding(self.model.get_submodule(facts.embedding), self.embed)
            self._put(facts.embedding, self.embedding)
        if description.last_stage:
            for tensor in facts.tensors:
                self._take(scope.sub("outside"), "", tensor)
            if facts.head is not None:
                self._add_head(scope.sub("lm_head"), facts.head)
        self.stage = self._stage()
        self._fill_buffers()
        self._split()

    def _stage(self) -> StageOfClass | None:
        """Returns the layers of this stage of a pipeline; None: it has all layers."""
        here, fact = [not layer.on_other_stage for layer in self.description.layers], self.facts.stages
        if all(here):
            return None
        assert fact is not None, "the layout has been checked"
        layers = [self.model.get_submodule(self._at(number)) for number in range(len(here))]
        return StageOfClass(layers, here, self.model.get_submodule(fact.norm), fact)

    def _at(self, number: int) -> str:
        """Returns the path of a layer."""
        return self.facts.layers_at.format(layer=number).removesuffix(".")

    def _add_head(self, scope: Scope, fact: HeadFact) -> None:
        """Puts our output head in the place of the class's."""
        tied_to = self.embed if self.description.tie_embeddings else None
        self.head = LMHead(scope, self.facts.vocab_size, tied_to)
        bias = scope.param("bias", (fact.rows,), init=Init.ZEROS) if fact.bias else None
        self._put(fact.name, HeadProduct(self.head, bias, torch.empty(0, dtype=scope.dtype, device=scope.device)))

    def _split(self) -> None:
        """Takes the class apart: what computes hidden states, and what computes logits of them."""
        self.decoder = decoder_of(self.model)
        self.logits_of = Given(self.model, self.decoder) if self.description.last_stage else None

    def _fill_layer(
        self,
        scope: Scope,
        spec: TransformersLayer,
        experts: TransformersExperts | None,
        number: int,
        rotary: RotaryTables,
    ) -> None:
        """Puts our parts in the place of those of a layer of the class."""
        at = self.facts.layers_at.format(layer=number)
        assert spec.attention is not None
        for linear in spec.linears:
            self._put(at + linear.name, TransformersLinear(scope.sub(linear.name), spec, linear))
        attention = self._attention(scope, spec, number, rotary)
        # Not as submodules: a class's own modules are what its code knows of.
        vars(self.model.get_submodule(at + spec.attention.module))["attention_of_step"] = attention
        for tensor in spec.tensors:
            if tensor.name == spec.attention.sinks:
                assert isinstance(attention, LayerAttention)
                self._set(at + tensor.name, attention.sinks)
            else:
                self._take(scope, at, tensor)
        if experts is not None:
            assert experts.fact is not None
            module = self.model.get_submodule(at + experts.fact.module)
            vars(module)["experts_of_layer"] = RoutedExperts(scope.sub("moe"), experts, self.step)
            for name in [*module._parameters]:
                module._parameters[name] = None

    def _attention(
        self, scope: Scope, spec: TransformersLayer, number: int, rotary: RotaryTables
    ) -> LayerAttention | TextAttention:
        """Returns what computes the attention of a layer."""
        return LayerAttention(scope, spec, number, rotary, self.step)

    def _take(self, scope: Scope, at: str, tensor: TensorFact) -> None:
        """Allocates a parameter or buffer that every rank has. at: what the names of the layer's modules begin with."""
        name = tensor.name if "." in tensor.name or not at else f"own.{tensor.name}"
        module, _, leaf = name.rpartition(".")
        inner = scope.sub(module) if module else scope
        if tensor.norm is not None:
            weight = norm_weight(inner, tensor.shape[0], tensor.norm.plus_one)
            self._put(at + module, ClassNorm(weight, tensor.norm.eps, scope.plan.entry(RMSNORM)))
            return
        dtype = torch.float32 if tensor.fp32 else None
        self._set(at + tensor.name, inner.param(leaf, tensor.shape, init=_initial(tensor), dtype=dtype))

    def _set(self, path: str, tensor: torch.Tensor | None) -> None:
        module, _, leaf = path.rpartition(".")
        owner = self.model.get_submodule(module)
        if leaf in owner._parameters:
            owner._parameters[leaf] = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor

    def _put(self, path: str, module: torch.nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)

    def _fill_buffers(self) -> None:
        """Computes the buffers that no checkpoint has, of what this rank computes."""
        elsewhere = [
            f"{self._at(number)}." for number, layer in enumerate(self.description.layers) if layer.on_other_stage
        ]
        outside = (*elsewhere, *self.facts.encoder_at)
        fill_buffers(self.model, self.device, lambda path: not path.startswith(outside))

    def compute(self, batch: ForwardBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Returns the decoder's output [T, H] after its final norm; in a stage before the last one the residual stream
        behind its layers."""
        inputs = self._inputs(batch, received)
        with AnglesOfStep() as angles:
            self.step.batch, self.step.angles = batch, angles
            try:
                out = self.decoder(**inputs, position_ids=batch.positions[None], use_cache=False, return_dict=True)
            finally:
                self.step.batch = self.step.angles = None
        if self.stage is not None and not self.description.last_stage:
            return self.stage.take()[0]
        hidden: torch.Tensor = out[0][0]
        return hidden

    def _inputs(self, batch: ForwardBatch, received: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Returns what the decoder is called with: token ids, or their embeddings with features of images in their
        places, or, in a later stage, the stream of the one before."""
        if received is not None:
            assert self.stage is not None
            self.stage.received = received[None]
            return {"inputs_embeds": received[None]}
        if batch.embedding_rows is None:
            return {"input_ids": batch.input_ids[None]}
        return {"inputs_embeds": batch.embedding_rows.put(self.embedding(batch.input_ids[None])[0])[None]}

    def by_block(self, batch: ForwardBatch, received: torch.Tensor | None) -> Blocks[torch.Tensor]:
        """Computes as `compute` does: a class has no blocks between which another step could compute."""
        yield from ()
        return self.compute(batch, received)

    def forward_microbatches(
        self, batch: ForwardBatch, microbatches: tuple[ForwardBatch, ForwardBatch], ping_pong: PingPong
    ) -> torch.Tensor:
        """Computes the whole batch at once."""
        return self(batch)

    def logits(self, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [R, V] fp32 of hidden [R, H] on every rank; [R, 0] in stages before the last."""
        if self.logits_of is None:
            return hidden.new_empty((len(hidden), 0), dtype=torch.float32)
        return self.logits_of.logits(hidden).float()

    def step_logits(
        self, hidden: torch.Tensor, exchange: RowExchange | None, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns logits as `logits` does."""
        return self.logits(hidden)

    def ignored_weight(self, name: str) -> bool:
        """Returns whether this rank needs nothing of a checkpoint tensor."""
        tied_head = self.description.tie_embeddings and name == f"{self.weights.model['lm_head']}.weight"
        if tied_head or name in self.on_other_ranks:
            return True
        if name.startswith(self.weights.unread) or name.endswith(self.weights.ignore):
            return True
        if any(re.search(pattern, name) for pattern in self.facts.ignored):
            return True
        return is_redundant(self.description.quantization, name)


def _initial(tensor: TensorFact) -> Init:
    """Returns the initial values of a dummy parameter: 1 for weights of norms, 0 for biases."""
    leaf = tensor.name.rpartition(".")[2]
    if leaf.endswith("bias"):
        return Init.ZEROS
    return Init.ONES if len(tensor.shape) <= 1 else Init.NORMAL


class TransformersEmbedding(torch.nn.Module):
    """The embedding of a class, whose rows ranks divide. A class that does more than to look up rows does it with the
    rows of the step, of which it looks up each once."""

    def __init__(self, embedding: torch.nn.Module, rows: VocabParallelEmbedding) -> None:
        super().__init__()
        self.rows = rows
        self.looked_up = embedding if type(embedding) is not torch.nn.Embedding else None
        self.weight = rows.weight
        if self.looked_up is not None:
            self.looked_up.padding_idx = None  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns [1, T, H] for ids [1, T]."""
        rows = self.rows(ids.flatten())
        if self.looked_up is None:
            return rows.view(*ids.shape, rows.shape[-1])
        self.looked_up._parameters["weight"] = rows  # type: ignore[assignment]
        out: torch.Tensor = self.looked_up(torch.arange(len(rows), device=rows.device).view(ids.shape))
        self.looked_up._parameters["weight"] = None
        return out


class HeadProduct(torch.nn.Module):
    """The output head of a class: hidden [..., H] -> logits [..., V] fp32."""

    def __init__(self, head: LMHead, bias: torch.Tensor | None, weight: torch.Tensor) -> None:
        """weight: without elements; classes ask it for its dtype."""
        super().__init__()
        self.head, self.bias, self.weight = head, bias, weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits without what the class does with them."""
        logits = self.head(hidden.reshape(-1, hidden.shape[-1]))
        logits = logits if self.bias is None else logits + self.bias.float()
        return logits.view(*hidden.shape[:-1], logits.shape[-1])
