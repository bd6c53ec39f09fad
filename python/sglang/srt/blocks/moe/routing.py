"""The MoE router, which selects the experts of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.moe.reference import (
    TOPK_HASH,
    TOPK_SIGMOID,
    TOPK_SOFTMAX,
    TOPK_SQRTSOFTPLUS,
    ImageCorrection,
    Routing,
)
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.errors import UserError
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

BY_SCORE = {op.name: op for op in (TOPK_SIGMOID, TOPK_SQRTSOFTPLUS)}
"""Ops that score each expert by itself."""


class TopK:
    """Routes x [T, H] to weights [T, k] fp32 and expert ids [T, k] int32, followed by the shared expert if
    `with_shared`. If `local` is not all experts, ids count from its first, and those of other ranks' experts are -1.

    The linear layer is `scope`'s "router"; the correction bias and the hash table are "correction" and "hash".
    """

    def __init__(self, scope: Scope, spec: Router, with_shared: bool, local: slice) -> None:
        self.spec, self.with_shared = spec, with_shared
        router = scope.sub("router")
        weights = router.matrix()
        num_experts, dtype = weights.rows - spec.sinks, getattr(torch, weights.dtype) if weights.dtype else None
        self.weight = _router_weight(router, spec, (weights.rows, weights.cols), dtype)
        self.bias = router.param("bias", (num_experts,), init=Init.ZEROS, dtype=dtype) if weights.bias else None
        self.linear = scope.plan.entry(LINEAR)
        plan, op = scope.plan, spec.op
        self.by_hash = plan.entry(TOPK_HASH) if op == TOPK_HASH.name else None
        self.by_softmax = plan.entry(TOPK_SOFTMAX) if op == TOPK_SOFTMAX.name else None
        scored = spec.scored_op
        self.by_score = plan.entry(BY_SCORE[scored]) if scored in BY_SCORE else None
        self.expert_map = _expert_map(scope, num_experts, local)
        self.correction: torch.Tensor | None = None
        self.table: torch.Tensor | None = None
        if spec.correction:
            self.correction = scope.sub("correction").param(
                spec.correction, (num_experts,), init=Init.ZEROS, dtype=torch.float32
            )
        self.image_correction: torch.Tensor | None = None
        if spec.image_token is not None:
            self.image_correction = scope.sub("correction").param(
                spec.image_correction, (num_experts,), init=Init.ZEROS, dtype=torch.float32
            )
        if spec.hash_table:
            self.table = _hash_table(scope.sub("hash"), spec, num_experts)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        exact = spec.exact_logits or spec.float32
        logits = self.linear(x, self.weight, self.bias, torch.float32 if exact else None)
        valid = None if batch is None else batch.num_valid_tokens
        if self.by_hash is not None:
            assert self.table is not None
            assert batch is not None, "hash routing needs the token ids"
            of_texts = self.by_hash(
                logits,
                token_ids=batch.input_ids,
                table=self.table,
                score=spec.score,
                scale=spec.scale,
                with_shared=self.with_shared,
                num_valid=valid,
                expert_map=self.expert_map,
            )
            return of_texts if self.image_correction is None else self._with_images(of_texts, logits, batch)
        groups = (spec.num_groups, spec.top_groups)
        if self.by_softmax is not None:
            return self.by_softmax(
                logits,
                spec.top_k,
                spec.renormalize,
                spec.scale,
                self.with_shared,
                num_valid=valid,
                groups=groups,
                expert_map=self.expert_map,
            )
        assert self.by_score is not None
        return self.by_score(
            logits,
            self.correction,
            spec.top_k,
            spec.renormalize,
            groups,
            scale=spec.scale,
            with_shared=self.with_shared,
            num_valid=valid,
            expert_map=self.expert_map,
            of_images=self._image_correction(batch),
        )

    def _with_images(self, of_texts: Routing, logits: torch.Tensor, batch: ForwardBatch) -> Routing:
        """Returns the routing of a table of ids, but for tokens of images that of scores, which all ids share."""
        spec = self.spec
        assert self.by_score is not None and spec.image_token is not None
        of_images = self.by_score(
            logits,
            self.image_correction,
            spec.top_k,
            True,
            scale=spec.scale,
            with_shared=self.with_shared,
            num_valid=batch.num_valid_tokens,
            expert_map=self.expert_map,
        )
        pictured = torch.eq(batch.input_ids, spec.image_token)[:, None]
        weights, ids = (torch.where(pictured, a, b) for a, b in zip(of_images, of_texts, strict=True))
        return weights, ids

    def _image_correction(self, batch: ForwardBatch | None) -> ImageCorrection | None:
        if self.image_correction is None or self.spec.image_token is None:
            return None
        assert batch is not None, "tokens of images are told by their ids"
        return ImageCorrection(self.image_correction, batch.input_ids, self.spec.image_token)


def _router_weight(scope: Scope, spec: Router, shape: tuple[int, int], dtype: torch.dtype | None) -> torch.Tensor:
    """Returns the weights of the router's linear layer, which include the factor of its logits."""
    if spec.logit_scale == 1.0:
        return scope.param("weight", shape, dtype=dtype)
    part = TensorPart(shape, convert=lambda stored: stored.float() * spec.logit_scale)
    return scope.param("weight", shape, {PartKey(): part}, dtype=dtype)


def _expert_map(scope: Scope, num_experts: int, local: slice) -> torch.Tensor | None:
    """Returns [E] int32: each expert's number among this rank's, -1 for others; None if this rank has all."""
    if local == slice(0, num_experts):
        return None
    numbers = torch.arange(num_experts, dtype=torch.int32, device=scope.device)
    return torch.where((numbers >= local.start) & (numbers < local.stop), numbers - local.start, -1)


def _hash_table(scope: Scope, spec: Router, num_experts: int) -> torch.Tensor:
    """Returns [V, k] int32: the experts of every token id."""
    shape = (scope.plan.model.vocab_size, spec.top_k)
    part = TensorPart(shape, dtypes=("I64", "I32"))

    def distinct(tensor: torch.Tensor, generator: torch.Generator) -> None:
        first = torch.randint(0, num_experts, (shape[0], 1), generator=generator, device=tensor.device)
        tensor.copy_((first + torch.arange(spec.top_k, device=tensor.device)) % num_experts)

    table = scope.param(spec.hash_table, shape, {PartKey(): part}, distinct, torch.int32)

    def check() -> None:
        least, most = int(table.min()), int(table.max())
        if least < 0 or most >= num_experts:
            raise UserError(
                f"{scope.module()}.{spec.hash_table} names experts {least} to {most}; there are {num_experts}"
            )

    scope.finish.append(check)
    return table
