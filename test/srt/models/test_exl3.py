"""EXL3 checkpoints with random trellises on a CPU, against transformers with the weights they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.trellis_linear import TrellisLinear

from .harness import TinyRunner, blocks_of, hf_logits, plan_for, random_tokens
from .quantized_checkpoints import PROJECTIONS, save_quantized
from .trellis_checkpoints import exl3

TOKENS = random_tokens(23, seed=1)
WITH_HEAD = (*PROJECTIONS, "lm_head")
MIXED = ((8, "mul1"), (7, "mul1"), (6, "mul1"))


def steps(runner: TinyRunner) -> torch.Tensor:
    extended = runner.extend({2: TOKENS[:20]})
    return torch.cat((*extended, *(runner.decode({2: token}) for token in TOKENS[20:])))


def wanted(reference: Path) -> torch.Tensor:
    return hf_logits(transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32), TOKENS)


def check(folder: Path, reference: Path) -> TinyRunner:
    plan = plan_for(folder / "quantized")
    runner = TinyRunner(plan)
    want = wanted(reference)
    torch.testing.assert_close(steps(runner), want, rtol=1e-3, atol=2e-3 * float(want.std()))
    held = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert held == plan.weight_bytes(), "the plan counts other bytes than are allocated"
    return runner


@pytest.mark.parametrize("forms", [MIXED, ((6, "mcg"), (8, "mcg")), ((4, "3inst"),)], ids=["mul1", "mcg", "3inst"])
def test_a_dense_model(forms: tuple[tuple[int, str], ...], tmp_path: Path) -> None:
    """Modules of one product have other bits, and scales of their own."""
    reference = save_quantized("qwen3_wide", exl3(forms), tmp_path, quantized=WITH_HEAD)
    mixer, ffn = blocks_of(check(tmp_path, reference).model.layers[0])
    assert isinstance(mixer.qkv.apply, TrellisLinear) and isinstance(ffn.down.apply, TrellisLinear)


def test_signs_packed_to_bits(tmp_path: Path) -> None:
    reference = save_quantized("llama_wide", exl3(packed_signs=True), tmp_path)
    check(tmp_path, reference)
