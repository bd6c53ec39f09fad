"""Models whose latent attention reads what an indexer selects: who selects, when nothing is selected, what is cached in
which form, checkpoints as they are published."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.errors import UserError
from sglang.srt.layers import native_sparse_ops
from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.layers.attention.sparse_rows import SparseRows
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.latent import indexed_layers
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import LayoutProblem, check_layout
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.selection import decoding_reads_less_from, describe_selection, prompts_cost_more_until
from sglang.srt.plan.stages import cut_stages, uncut_runs

from .harness import TinyRunner, blocks_of, hf_logits, plan_for, random_tokens, save_tiny
from .quantized_checkpoints import FORMS, save_quantized

TOKENS = random_tokens(40, seed=1)
WIDE_TOLERANCE = {"rtol": 0.0, "atol": 5e-4}
"""Of sums of hundreds, in another order."""


def wanted(reference: Path) -> torch.Tensor:
    return hf_logits(transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32), TOKENS)


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of TOKENS: a prompt, pieces over its cache that end within and beyond what may be selected, and decoded
    tokens."""
    pieces = [runner.extend({2: TOKENS[first:end]})[0] for first, end in ((0, 9), (9, 20), (20, 21), (21, 36))]
    return torch.cat((*pieces, *(runner.decode({2: token}) for token in TOKENS[36:])))


def median_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the median token: for a few another expert is chosen, or another token selected."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


# --- who selects ----------------------------------------------------------------------------------------------------


def test_layers_that_share_a_selection_have_no_indexer(tmp_path: Path) -> None:
    save_tiny("glm_moe_dsa", tmp_path)
    runner = TinyRunner(plan_for(tmp_path))
    indexers = [blocks_of(layer)[0].indexer is not None for layer in runner.model.layers]
    assert indexers == [True, False, True, False]
    caches = [store.layer_id for store in runner.model.caches if store.name == "index"]
    assert caches == [0, 2]
    assert {name.split(".")[1] for name in runner.model.params if "index" in name} == {"0", "2"}


def test_what_is_not_longer_than_a_selection_is_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("glm_moe_dsa", tmp_path)
    runner = TinyRunner(plan_for(tmp_path))
    scored: list[int] = []
    for indexer in filter(None, (blocks_of(layer)[0].indexer for layer in runner.model.layers)):
        select = indexer.select
        monkeypatch.setattr(
            indexer, "select", lambda *args, select=select: (scored.append(len(args[4])), select(*args))[1]
        )
    runner.extend({1: TOKENS[:8], 3: TOKENS[:3]})
    for i in range(8, 12):
        runner.decode({1: TOKENS[i]})
    assert scored == [], "12 tokens are selected"
    runner.decode({1: TOKENS[12], 3: TOKENS[3]})
    assert scored == [2, 2], "by two layers, for both requests of the step"
    runner.extend({3: TOKENS[4:20], 2: TOKENS[:2]})
    assert scored[2:] == [18, 18]


def kinds(**values: Any) -> list[bool]:
    return indexed_layers(Config({"num_hidden_layers": 8, **values}, "config.json"))


def test_tokens_that_select_lie_behind_requests_that_do_not() -> None:
    entries = EntryRows(torch.zeros((2, 16), dtype=torch.int32), torch.ones(5), torch.arange(6, 11), 10)
    site = SimpleNamespace(top_k=8)
    rows = SparseRows(site, 3, entries, with_decodes=False, with_prompts=True)  # type: ignore[arg-type]
    assert rows.tokens == slice(3, 8) and rows.selects


def test_which_layers_select() -> None:
    assert kinds() == [True] * 8
    assert kinds(indexer_types=["full", "shared"] * 5) == [True, False] * 4, "the rest are of drafts"
    every_fourth = [True, True, True, False, False, False, True, False]
    assert kinds(index_topk_freq=4, index_skip_topk_offset=3) == every_fourth
    assert kinds(index_topk_pattern="FFFSSSFS") == every_fourth
    published = json.loads((Path(__file__).parents[1] / "kernels/configs/glm5.json").read_text())
    assert all(kinds(**published))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"indexer_types": ["full", "half"] * 4}, "kinds half"),
        ({"indexer_types": ["full"] * 7}, "7 entries for 8 layers"),
        ({"index_topk_pattern": "FS"}, "2 kinds for 8 layers"),
        ({"index_topk_pattern": "SFFFFFFF"}, "no layer before it makes one"),
    ],
)
def test_kinds_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kinds(**values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types full_attention"),
        ({"moe_router_dtype": "bfloat16"}, "moe_"),
    ],
)
def test_values_that_are_not_computed(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("glm_moe_dsa", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        _ = plan_for(tmp_path).description


def test_what_costs_less() -> None:
    """GLM-5 at TP8: n^2 8 (256 + 256) and n^2 32 x 128 / 2 against 2 n 2048 x 16 (576 + 512)."""
    config = json.loads((Path(__file__).parents[1] / "kernels/configs/glm5.json").read_text())
    model = describe_model(config, None)
    mixer = model.layers[0].mixer
    assert isinstance(mixer, MLA)
    assert prompts_cost_more_until(mixer, 1.0, 8) == 2 * 2048 * 16 * 1088 / (8 * 512 - 32 * 128 / 2)
    assert prompts_cost_more_until(mixer, 0.25, 8) < prompts_cost_more_until(mixer, 1.0, 8)
    serving = ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(8))
    assert decoding_reads_less_from(mixer, 1.0, serving) == math.ceil(2048 * 1152 / (1152 - 132))
    text = describe_selection(model, serving)
    assert "78 of 78 layers" in text and "34,816 tokens" in text and "2,314 tokens" in text
    dense = json.loads((Path(__file__).parents[1] / "kernels/configs/deepseek_v3.json").read_text())
    assert describe_selection(describe_model(dense, None), serving) == ""


# --- stages ---------------------------------------------------------------------------------------------------------


def test_stages_begin_at_layers_with_an_indexer(tmp_path: Path) -> None:
    kinds_of_six = ["full", "full", "shared", "shared", "full", "full"]
    save_tiny("glm_moe_dsa", tmp_path, num_hidden_layers=6, indexer_types=kinds_of_six)
    model = plan_for(tmp_path).description
    assert uncut_runs(model) == [range(1), range(1, 4), range(4, 5), range(5, 6)]
    for count in range(1, 5):
        layout = RankLayout(1, pp_size=count)
        check_layout(model, layout)
        stages = cut_stages(rank_weights(model, layout), "float32")
        assert [i for stage in stages for i in stage.layers] == list(range(6)) and len(stages) == count
        assert {stage.layers.start for stage in stages} <= {0, 1, 4, 5}
    with pytest.raises(LayoutProblem, match="4 layers with an indexer"):
        check_layout(model, RankLayout(1, pp_size=5))


# --- caches of one byte an element ------------------------------------------------------------------------------------


def rounding_latents(runner: TinyRunner) -> TinyRunner:
    """Whose cache holds what packed latents stand for, read as those are."""
    for layer in runner.model.layers:
        mixer = blocks_of(layer)[0]

        def store(*args: Any, original: Any = mixer.store) -> torch.Tensor:
            entries, cache, loc = original(*args), args[7], args[8]
            cache[loc, 0] = native_sparse_ops.unpack_latents(native_sparse_ops.pack_latents(entries))
            return entries

        mixer.store = store
    for site in runner.attention.sparse.values():
        site.packed = True
    return runner


@pytest.mark.parametrize("top_k", [64, 16], ids=["all", "some"])
def test_packed_latents(top_k: int, tmp_path: Path) -> None:
    """Of pieces with and without a prefix, within what may be selected and beyond it."""
    save_tiny("glm_moe_dsa_wide", tmp_path, index_topk=top_k)
    plan = plan_for(tmp_path, kv_cache_dtype="fp8_e4m3")
    runner = TinyRunner(plan)
    stores = [store for store in runner.model.caches if store.name == "latent"]
    assert {store.k.dtype for store in stores} == {torch.uint8} and {store.k.shape[-1] for store in stores} == {656}
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes(), "no scales of a cache"
    got, want = steps(runner), steps(TinyRunner(plan_for(tmp_path)))
    torch.testing.assert_close(want, wanted(tmp_path), **WIDE_TOLERANCE)
    torch.testing.assert_close(got[:9], want[:9], **WIDE_TOLERANCE)  # no latent of theirs was in the cache before
    assert 0 < median_error(got[9:], want[9:]) < 0.3
    torch.testing.assert_close(got, steps(rounding_latents(TinyRunner(plan_for(tmp_path)))), **WIDE_TOLERANCE)


def test_index_keys_of_one_byte_select_nearly_the_same(tmp_path: Path) -> None:
    save_tiny("glm_moe_dsa_wide", tmp_path)
    runner = TinyRunner(plan_for(tmp_path, dtype="bfloat16"))
    stores = [store for store in runner.model.caches if store.name == "index"]
    assert {(store.k.dtype, store["scale"].dtype) for store in stores} == {(torch.float8_e4m3fn, torch.float32)}
    got, want = steps(runner), wanted(tmp_path)
    assert median_error(got[:16], want[:16]) < 0.08, "all is selected"
    assert median_error(got[16:], want[16:]) < 0.3


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "keep"),
    [
        ("fp8_block", ()),
        ("modelopt_nvfp4", ("self_attn.indexer", "kv_a_proj", "kv_b_proj", "q_a_proj", "q_b_proj")),
        ("modelopt_nvfp4", ("self_attn", "shared_experts", "layers.0")),
    ],
    ids=["FP8", "V3.2-NVFP4", "GLM-5.2-NVFP4"],
)
def test_quantized_checkpoints(form: str, keep: tuple[str, ...], tmp_path: Path) -> None:
    written = FORMS[form]
    if written.modelopt:
        excluded = ["lm_head", "*mlp.gate", *(f"*{part}*" for part in keep)]
        quantization = written.modelopt["quantization"] | {"exclude_modules": excluded, "kv_cache_quant_algo": "FP8"}
        written = replace(written, modelopt=written.modelopt | {"quantization": quantization})
    save_quantized("glm_moe_dsa_wide", written, tmp_path, keep=keep)
    assert (plan_for(tmp_path / "quantized").kv_cache_dtype == "fp8_e4m3") == bool(written.modelopt)
    plan = plan_for(tmp_path / "quantized", kv_cache_dtype="float32")
    runner = TinyRunner(plan)
    want = wanted(tmp_path / "reference")
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **WIDE_TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    apart = plan.description.shared_apart
    assert (apart is not None) == ("shared_experts" in keep), "a shared expert in 16 bits beside packed ones"
