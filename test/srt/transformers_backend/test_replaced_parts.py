"""Norms and rotations of classes that kernels here compute: known by their values, and left alone otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from sglang.srt.blocks.transformers_layer.rotation import AnglesOfStep, deferred
from sglang.srt.models.transformers_backend.norms import NormFinder
from sglang.srt.models.transformers_backend.rotations import Rotations, _rotates_halves
from sglang.srt.models.transformers_backend.trial import facts_of
from sglang.srt.plan.transformers_backend.asking import request_of
from sglang.srt.plan.transformers_backend.facts import ClassFacts, NormFact
from srt.transformers_backend.tiny import causal_classes, config_values, tiny_config


class CentredNorm(torch.nn.Module):
    """No RMS norm: it subtracts the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class OutsideNorm(CentredNorm):
    """No RMS norm: it adds its epsilon to the root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (modeling_llama.LlamaRMSNorm(8, 1e-5), NormFact(1e-5, plus_one=False)),
        (modeling_gemma2.Gemma2RMSNorm(8, 1e-6), NormFact(1e-6, plus_one=True)),
        (modeling_cohere2.Cohere2LayerNorm(8, 1e-5), None),
        (CentredNorm(), None),
        (OutsideNorm(), None),
        (torch.nn.LayerNorm(8), None),
        (torch.nn.Linear(8, 8), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_rms_norm_is_known_by_its_values(module: torch.nn.Module, expected: NormFact | None) -> None:
    assert NormFinder().norm_of(module.to("meta")) == expected


def half_of_the_head(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    width = cos.shape[-1]
    turned = modeling_llama.apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin)
    return tuple(torch.cat((a, b[..., width:]), dim=-1) for a, b in zip(turned, (q, k), strict=True))


def test_a_rotation_is_known_by_its_values() -> None:
    assert _rotates_halves(modeling_llama.apply_rotary_pos_emb, 16, 16)
    assert _rotates_halves(half_of_the_head, 16, 8)
    assert not _rotates_halves(modeling_cohere2.apply_rotary_pos_emb, 16, 16), "neighbours rotate together"
    assert not _rotates_halves(lambda q, k, cos, sin: (q, k), 16, 16)


def facts(kind: str, **changed: Any) -> ClassFacts:
    config = tiny_config(kind)
    for name, value in changed.items():
        setattr(config, name, value)
    return facts_of(request_of(config_values(config, causal_classes()[kind]), "", False))


def test_classes_whose_rotation_kernels_compute() -> None:
    assert [layer.attention.rotary_dim for layer in facts("llama").layers] == [16] * 4
    assert [layer.attention.rotary_dim for layer in facts("smollm3").layers] == [16, 16, 16, 0], "one does not rotate"
    assert [layer.attention.rotary_dim for layer in facts("cohere2").layers] == [0] * 4
    assert [layer.attention.rotary_dim for layer in facts("hunyuan_v1_dense").layers] == [0] * 4, "norms come after it"


def test_what_is_done_after_the_rotation_keeps_it() -> None:
    rotations, (q, k, cos) = Rotations(), torch.empty(3, 1, 2, 5, 8, device="meta")
    rotate = rotations._recorded(lambda q, k, cos, sin: (q + 0, k + 0))
    query, key = rotate(q, k, cos, cos)
    assert rotations.dim_of(query * 2, key) == 0
    assert not rotations.replaceable(torch.nn.Module())


def test_a_deferred_function_rotates_unless_a_step_is_computed() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    angles = torch.rand(3, 4)
    cos, sin = (torch.cat((half, half), -1)[None] for half in (angles.cos(), angles.sin()))
    rotate = deferred(modeling_llama.apply_rotary_pos_emb)
    assert deferred(rotate) is rotate
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert all(map(torch.equal, rotate(q, k, cos, sin), expected))
    with AnglesOfStep() as step:
        assert rotate(q, k, cos, sin) == (q, k)
        rows, table = step.take()
        assert rows.tolist() == [0, 1, 2]
        torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), -1))
        with pytest.raises(AssertionError, match="has just called"):
            step.take()
    assert all(map(torch.equal, rotate(q, k, cos, sin), expected))


def test_a_function_with_other_arguments_is_left_alone() -> None:
    """Gemma 4 rotates queries and keys one after the other."""
    rotations, x = Rotations(), torch.randn(1, 2, 5, 8)
    assert rotations._recorded(lambda x, cos, sin: x * cos + sin)(x, x, x).equal(x * x + x)
    assert rotations.has_others and not rotations.replaceable(torch.nn.Module())
    assert [layer.attention.rotary_dim for layer in facts("gemma4_text").layers] == [0] * 4
