"""What the exporter writes is what the server computes: exported models on a CPU, against transformers with the weights
that their codes and scales stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from srt.models.harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

from sglang.quantize.export import Selection, export
from sglang.quantize.formats import FORMATS
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization.reference import dequantize, quantize

TOKENS = random_tokens(17, seed=3)


def stand_in(folder: Path, scheme: str, exported: dict[str, torch.Tensor]) -> None:
    """Replaces the weights of an unquantized model by what `exported` holds for them."""
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if name not in exported or exported[name].dtype != weight.dtype:
            factor = exported.get(f"{module}.weight_scale_2")
            tensors[name] = dequantize(quantize(weight, SCHEMES[scheme], factor), SCHEMES[scheme])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("scheme", FORMATS)
def test_an_exported_model_is_served(scheme: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny("qwen3_moe_wide", source)
    report = export(str(source), str(target), FORMATS[scheme], Selection())
    assert len(report.quantized) == 3 * (4 + 4 * 3) and 0 < report.relative_error < 0.15
    runner = TinyRunner(plan_for(target))
    got = torch.cat((*runner.extend({2: TOKENS[:14]}), *(runner.decode({2: token}) for token in TOKENS[14:])))
    stand_in(source, scheme, load_file(target / "model.safetensors"))
    want = hf_logits(transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4)
