"""Step-5: logits of a plain reference in every kind of step and on ranks, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization import reference
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.weight_spec import Matrix

from .harness import TinyRunner, plan_for
from .ling3_reference import save
from .ranks_alike import assert_ranks_alike
from .step5_reference import CONFIG, Step5, weights
from .test_ling3 import CLOSE, TOKENS, steps
from .test_quantized import TOLERANCE

SPARSE = CONFIG["sparse_config"]


def test_logits_of_the_reference(tmp_path: Path) -> None:
    tensors = weights()
    plan = plan_for(save(tmp_path, CONFIG, tensors))
    assert plan.description.unsupported == ()
    runner, want = TinyRunner(plan), Step5(tensors, CONFIG).logits(TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **CLOSE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


ROUNDED = re.compile(r".*(?<!\.g)_proj\.weight")


def test_experts_in_one_tensor_are_quantized_while_they_are_loaded(tmp_path: Path) -> None:
    """With --quantization fp8: those of each matrix of all experts, each row with its scale, and the shared one."""
    tensors = weights()
    plan = plan_for(save(tmp_path, CONFIG, tensors), quantization="fp8")
    moe = next(layer.ffn for layer in plan.description.layers if isinstance(layer.ffn, MoE))
    parts = moe.weights(plan.description.hidden_size, ONE_RANK, moe.intermediate_size)
    matrices = [part for part in parts if isinstance(part, Matrix)]
    wide = [matrix.name for matrix in matrices if plan.description.quant_of(1, matrix) is None]
    assert wide == ["moe.router"] and {"moe.w13", "moe.w2", "moe.shared.down"} <= {part.name for part in matrices}
    scheme = SCHEMES["fp8_channel"]

    def stands_for(matrix: torch.Tensor) -> torch.Tensor:
        return reference.dequantize(reference.quantize(matrix, scheme), scheme)

    rounded = {
        name: torch.stack([stands_for(one) for one in tensor]) if tensor.ndim == 3 else stands_for(tensor)
        for name, tensor in tensors.items()
        if ROUNDED.fullmatch(name)
    }
    assert sum(".moe." in name for name in rounded) == 6
    runner = TinyRunner(plan)
    want = TinyRunner(plan_for(save(tmp_path / "rounded", CONFIG, tensors | rounded)))
    torch.testing.assert_close(steps(runner), steps(want), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_the_selection_changes_what_comes_out() -> None:
    """Otherwise the test above would say nothing about it; up to two closed regions all tokens are seen."""
    tensors, few = weights(), (SPARSE["topk"] + 1) * SPARSE["region_block_size"] - 1
    chosen, all_seen = (Step5(tensors, CONFIG, selects).logits(TOKENS) for selects in (True, False))
    assert (chosen - all_seen).abs().max() > 0.01
    torch.testing.assert_close(chosen[:few], all_seen[:few])


def test_kv_heads_select_apart() -> None:
    x = torch.randn(len(TOKENS), CONFIG["hidden_size"], generator=torch.Generator().manual_seed(3))
    first, second = Step5(weights(), CONFIG).chosen(x, "model.layers.1.self_attn.sparse_indexer_", 6000.0)
    assert (first != second).any()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_give_the_logits_of_one(size: int, tmp_path: Path) -> None:
    save(tmp_path / "quantized", CONFIG, weights())
    assert_ranks_alike(size, steps, CLOSE, tmp_path)


def test_layers_of_a_config(tmp_path: Path) -> None:
    layers = plan_for(save(tmp_path, CONFIG, {})).description.layers
    assert [type(layer.mixer) for layer in layers] == [GQA, RegionSparse, GQA, RegionSparse]
    sparse = layers[1].mixer
    assert isinstance(sparse, RegionSparse) and sparse.indexer.num_heads == 4 and sparse.index_rope.rot_dim == 8
    assert sparse.heads.rotary_dim == 8 and sparse.selected_slots(1) == 2 * 3 and sparse.token_scores(128, 1) == 2 * 32


def test_a_config_without_regions_is_dense(tmp_path: Path) -> None:
    config = CONFIG | {"sparse_config": {**SPARSE, "enabled": False}}
    assert all(isinstance(layer.mixer, GQA) for layer in plan_for(save(tmp_path, config, {})).description.layers)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_provider_groups": 4}, "8 index heads in num_provider_groups 4 for 2 KV heads"),
        ({"compression_method": "mean"}, "compression_method = 'mean' is not supported"),
        ({"sparse_indexer_csa_z_norm_type": "rms"}, "z_norm_type = 'rms' is not supported"),
        ({"sparse_indexer_rope_dim": 32}, "proxy_dim 16 is less than the 32 rotary dims"),
        ({"apply_to_layer_types": ["sliding_attention"]}, "apply_to_layer_types = .* is not supported"),
        ({"local_window_blocks": 2}, "sparse_config: local_window_blocks = 2 is not supported: no layer here reads it"),
        ({"enabled": "false"}, "sparse_config: 'enabled' must be of type bool; got 'false'"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _ = plan_for(save(tmp_path, CONFIG | {"sparse_config": {**SPARSE, **keys}}, {})).description
