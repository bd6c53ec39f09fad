"""Places for what no family here has yet: another residual stream, inputs that are no tokens, positions in sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sglang.srt.errors import UserError
from sglang.srt.kernels.spec import Need
from sglang.srt.layers.input_rows import EmbeddingRows
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.residual import Block
from sglang.srt.layers.rotary_embedding import SectionPositions
from sglang.srt.models import causal_lm
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.layer_spec import ParallelConfig, ResidualDefaults
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.weight_spec import Weights
from sglang.srt.plan.weights import rank_weight_bytes

from .harness import NativePlan, TinyRunner, plan_for, random_tokens, save_tiny

TOKENS = random_tokens(12, seed=1)


@dataclass(frozen=True, slots=True)
class Copies(ResidualDefaults):
    """A residual of `streams` equal vectors: what every block adds is shared out, and their sum is the plain stream."""

    streams: int

    def needs(self, serving: ParallelConfig) -> Iterator[Need]:
        return iter(())

    def weights(self, hidden_size: int) -> Weights:
        return ()


class CopiesJoin:
    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm

    def attach(self, block: Block) -> None:
        """Blocks sum by themselves."""

    def before(self, stream: torch.Tensor) -> torch.Tensor:
        return self.norm(stream.sum(1), None)[0]

    def after(self, stream: torch.Tensor, out: torch.Tensor) -> None:
        stream += out[:, None] / stream.shape[1]


class CopiesStream:
    def __init__(self, scope: Scope, model: ModelDescription, spec: Copies) -> None:
        self.model, self.spec = model, spec
        self.norm = RMSNorm(scope.sub("norm"), model.hidden_size, model.norm_eps)

    def join(self, scope: Scope, block: str) -> CopiesJoin:
        return CopiesJoin(RMSNorm(scope.sub(block), self.model.hidden_size, self.model.norm_eps))

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded[:, None].repeat(1, self.spec.streams, 1) / self.spec.streams

    def finish(self, stream: torch.Tensor) -> torch.Tensor:
        return self.norm(stream.sum(1), None)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seams")
    save_tiny("qwen3_moe_mixed", folder)
    return folder


def with_residual(plan: NativePlan, residual: object) -> NativePlan:
    layers = tuple(replace(layer, residual=residual) for layer in plan.description.layers)
    plan.__dict__["description"] = replace(plan.description, layers=layers)
    return plan


def test_another_residual_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = TinyRunner(plan_for(folder)).extend({1: TOKENS})[0]
    plan = with_residual(plan_for(folder), Copies(3))
    with pytest.raises(UserError, match=r"Qwen3MoeForCausalLM: nothing here computes Copies\(streams=3\) yet"):
        TinyRunner(plan)
    monkeypatch.setattr(causal_lm, "RESIDUALS", {**causal_lm.RESIDUALS, Copies: CopiesStream})
    runner = TinyRunner(plan)
    assert isinstance(runner.model.residual, CopiesStream)
    torch.testing.assert_close(runner.extend({1: TOKENS})[0], want, rtol=0.0, atol=1e-4)
    held = sum(param.tensor.nbytes for param in runner.model.params.values())
    assert held == rank_weight_bytes(rank_weights(plan.description, ONE_RANK), plan.dtype)


def test_layers_with_residual_streams_of_several_kinds(folder: Path) -> None:
    plan = plan_for(folder)
    first, *others = plan.description.layers
    layers = (first, *(replace(layer, residual=Copies(3)) for layer in others))
    plan.__dict__["description"] = replace(plan.description, layers=layers)
    with pytest.raises(UserError, match=r"layers have the residual streams .* and Copies\(streams=3\)"):
        CausalLM(plan, device="meta")


@dataclass(frozen=True, slots=True)
class Unknown:
    num_heads: int = 4


def test_a_mixer_that_nobody_computes(folder: Path) -> None:
    plan = plan_for(folder)
    layers = tuple(replace(layer, mixer=Unknown()) for layer in plan.description.layers)
    plan.__dict__["description"] = replace(plan.description, layers=layers)
    with pytest.raises(UserError, match="nothing here computes Unknown layers yet"):
        CausalLM(plan, device="meta")


@torch.inference_mode()
def test_rows_of_embeddings_instead_of_tokens(folder: Path) -> None:
    """The embeddings of other tokens, given as rows, give the logits of those tokens."""
    want = TinyRunner(plan_for(folder)).extend({1: TOKENS})[0]
    runner = TinyRunner(plan_for(folder))
    replaced = [3, 4, 9]
    tokens = [7 if i in replaced else token for i, token in enumerate(TOKENS)]
    batch = runner.batch_of_prompts({1: tokens})
    rows = runner.model.embed(torch.tensor([TOKENS[i] for i in replaced]))
    batch.embedding_rows = EmbeddingRows(torch.tensor(replaced), rows)
    got = runner.model.logits(runner.model(batch))
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5)


@torch.inference_mode()
def test_positions_in_sections(folder: Path) -> None:
    """Equal in all sections they are those of text; other heights turn other frequencies."""
    plan = plan_for(folder)
    sections = (8, 4, 4)

    def sectioned(layer):
        return replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, sections=sections)))

    plan.__dict__["description"] = replace(
        plan.description, layers=tuple(sectioned(layer) for layer in plan.description.layers)
    )
    want = TinyRunner(plan_for(folder)).extend({1: TOKENS})[0]
    results = []
    for shift in (0, 5):
        runner = TinyRunner(plan)
        batch = runner.batch_of_prompts({1: TOKENS})
        heights = batch.positions + shift * (batch.positions > 5)
        batch.mrope_positions = SectionPositions(torch.stack((batch.positions, heights, batch.positions)))
        results.append(runner.model.logits(runner.model(batch)))
    torch.testing.assert_close(results[0], want, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(results[1][:6], want[:6], rtol=0.0, atol=1e-5)
    assert (results[1][6:] - want[6:]).abs().max() > 1e-2
