"""Drafts in the plan of their target: caches, sites, kernels, bytes. Synthetic GPUs; no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quant_rules import QuantConfig, Rule, component
from sglang.srt.configs.quantization import online_fp8
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.block.readers.trained import TrainedBlock, trained_block
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import NoKernel
from sglang.srt.plan.cache_spec import Window
from sglang.srt.plan.caches import row_tables
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import any_checkpoint, configs

GIB = 1024**3
PACKAGES = frozenset({"triton"})
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "draft_vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def head_for(target: dict[str, Any]) -> dict[str, Any]:
    text = target.get("text_config", target)
    return EAGLE3 | {"hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"]}


def plan_of(
    folder: str, arch: str = "rtx-pro-6000-server", free: float = 94 * GIB, rank: int = 0, **flags: Any
) -> Plan:
    args = ServerArgs.from_kwargs(model_path=folder, load_format="dummy", **flags)
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, arch_by_name(arch), int(free), PACKAGES, rank=rank)


def test_a_head_is_a_part_of_its_targets_plan(tmp_path: Path) -> None:
    config = configs()["qwen3"]
    target, head = write(tmp_path / "target", config), write(tmp_path / "head", head_for(config))
    plain = plan_of(target)
    plan = plan_of(target, speculative_algorithm="EAGLE3", speculative_draft_model_path=head)
    layers = config["num_hidden_layers"]
    assert plan.draft is not None and plan.aux_layers == (1, layers // 2 - 1, layers - 4)
    (group,) = plan.caches
    assert [member.layer_id for member in group.members] == [*range(layers), layers]
    weights = plan.draft.weight_bytes("bfloat16")
    hidden = config["hidden_size"]
    # fc, attention over 2 H, MLP, the reduced head.
    matrices = (
        hidden * 3 * hidden + (32 + 16) * 128 * 2 * hidden + hidden * 32 * 128 + 3 * 12288 * hidden + 32000 * hidden
    )
    assert weights == pytest.approx(2 * matrices, rel=1e-3)
    assert plan.memory.weights == plain.memory.weights + weights
    assert plan.max_total_num_tokens < plain.max_total_num_tokens
    assert {"fused_moe", "fused_moe/draft"}.isdisjoint(plan.choices) and plan.draft.description.reduced
    view = plan.for_draft
    assert view.description.layers[0].mixer.weights(hidden, 1)[0].cols == 2 * hidden
    assert (hidden, 3 * hidden, False) in plan.choices["linear"].need.shapes


@pytest.mark.parametrize("tp", [1, 2])
def test_an_embedding_of_its_own_leaves_gpu_memory_with_the_targets(tmp_path: Path, tp: int) -> None:
    """Of a narrower head, and of a model of its own; a model whose output head multiplies by it keeps it."""
    config = configs()["qwen3"]
    narrow = head_for(config) | {"hidden_size": 2048, "target_hidden_size": config["hidden_size"]}
    small = config | {"num_hidden_layers": 4, "hidden_size": 2048}
    for kind, draft, of_draft in (
        ("EAGLE3", narrow, 2048),
        ("STANDALONE", small | {"tie_word_embeddings": False}, 2048),
        ("STANDALONE", small | {"tie_word_embeddings": True}, 0),
    ):
        folder = tmp_path / f"{kind} {of_draft}"
        folder.mkdir()
        target, path = write(folder / "target", config), write(folder / "draft", draft)
        flags = {"speculative_algorithm": kind, "speculative_draft_model_path": path, "tp_size": tp}
        of_gpu = plan_of(target, **flags)
        of_host = plan_of(target, embed_in_main_memory=True, **flags)
        size = config["vocab_size"] // tp * 2 * (config["hidden_size"] + of_draft)
        assert of_gpu.memory.weights - of_host.memory.weights == size
        assert f"embeddings lie in pinned host memory, {size / GIB:.2f} GiB" in " ".join(of_host.warnings)
        assert of_host.for_draft.choices["embedding_rows"].name == "triton"


def test_the_draft_of_experts_in_16_bits_has_a_kernel_of_its_own(tmp_path: Path) -> None:
    target = any_checkpoint("Qwen3.5-122B-A10B-NVFP4", tmp_path)
    plan = plan_of(str(target), speculative_algorithm="NEXTN", tp_size=2)
    assert plan.draft is not None
    routed, own = plan.choices["fused_moe"], plan.choices["fused_moe/draft"]
    assert routed.need.quant == "nvfp4" and own.need.quant is None
    assert (
        plan.for_draft.choices["fused_moe"] is own
        and plan.for_draft.tile_configs["fused_moe"] is plan.tile_configs["fused_moe/draft"]
    )
    assert plan.draft.describe()["weights"] == ["16 bits"]


def test_only_the_last_stage_has_the_draft(tmp_path: Path) -> None:
    config = configs()["qwen3"]
    target, head = write(tmp_path / "target", config), write(tmp_path / "head", head_for(config))
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, "pp_size": 2}
    first, last = (plan_of(target, rank=rank, **flags) for rank in range(2))
    assert first.draft is None and last.draft is not None and first.aux_layers == last.aux_layers
    layers = config["num_hidden_layers"]
    ids = [[member.layer_id for group in plan.caches for member in group.members] for plan in (first, last)]
    assert ids[0] + ids[1] == [*range(layers), layers]
    assert first.max_total_num_tokens == last.max_total_num_tokens


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("glm47", {"tp_size": 8}),
        ("deepseek_v3", {"tp_size": 16}),
        ("qwen35", {"tp_size": 2}),
        ("Qwen3.6-27B-NVFP4", {}),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", {"tp_size": 2}),
        ("NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", {"speculative_num_steps": 2}),
    ],
)
def test_families_draft_for_themselves(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(str(any_checkpoint(name, tmp_path)), speculative_algorithm="NEXTN", **flags)
    assert plan.draft is not None and plan.draft.description.kind == "MTP"
    cached = {member.layer_id for group in plan.caches for member in group.members}
    assert max(cached) >= plan.draft.description.first_layer


def test_two_attention_backends_are_one_too_many(tmp_path: Path) -> None:
    """Latents and heads: FlashInfer has a backend for each."""
    config = configs()["deepseek_v3"]
    target, head = write(tmp_path / "target", config), write(tmp_path / "head", head_for(config))
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, "tp_size": 16}
    plan = plan_of(target, **flags)
    assert plan.choices["decode_attention"].spec.entry == plan.choices["decode_attention/128x128"].spec.entry
    args = ServerArgs.from_kwargs(model_path=target, load_format="dummy", attention_backend="flashinfer", **flags)
    packages = PACKAGES | {"flashinfer"}
    with pytest.raises((UserError, NoKernel), match="--attention-backend triton"):
        make_plan(args, ModelConfig.from_server_args(args), arch_by_name("sm_120"), 94 * GIB, packages)


def test_tensors_in_16_bits_are_not_quantized_whatever_the_rules_say() -> None:
    quantized = online_fp8("fp8").rules[1].quant
    assert quantized is not None
    for storage, wanted in (("fp8", None), ("online", quantized)):
        quant = type(quantized)("fp8_channel", storage)
        rules = QuantConfig("fp8", "config.json", (Rule((component("mlp", ""),), quant),))
        stored = {
            "a.mlp.experts.0.up_proj.weight": "BF16",
            "b.mlp.up_proj.weight": "F8_E4M3",
            "a.mlp.norm.bias": "BF16",
        }
        result = stored_wide(rules, stored)
        assert result is not None
        assert result.of("a.mlp.experts.7.up_proj") == (quant if wanted else None)
        assert result.of("b.mlp.up_proj") == quant
    assert stored_wide(None, {}) is None


DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 5},
    "torch_dtype": "bfloat16",
}


def test_the_assistant_of_muse_glimmer(tmp_path: Path) -> None:
    """A config that leaves everything out is that of the published one, whose file has 5.1 GB."""
    names = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    draft = write(tmp_path / "draft", names | {"dtype": "bfloat16"})
    target = str(any_checkpoint("Muse-Glimmer-30B", tmp_path))
    sizes: dict[str, Any] = {"max_running_requests": 64, "cuda_graph_max_bs": 64, "chunked_prefill_size": 2048}
    plain = plan_of(target, **sizes)
    plan = plan_of(target, speculative_algorithm="DFLASH", speculative_draft_model_path=draft, **sizes)
    assert plan.draft is not None and plan.aux_layers == (1, 13, 25, 37, 49)
    hidden = 6656
    layer = hidden * (32 + 8 + 8) * 128 + 32 * 128 * hidden + 3 * 19968 * hidden + 2 * hidden + 2 * 128
    weights = 2 * (5 * layer + 5 * hidden * hidden + 2 * hidden)
    assert plan.draft.weight_bytes("bfloat16") == weights == pytest.approx(5.1e9, rel=0.01)
    assert plan.memory.weights == plain.memory.weights + weights
    # No table beside those of the target: one of all tokens, one of its windows.
    assert [table.tokens for table in row_tables(plan.caches) if isinstance(table, Window)] == [2048]
    assert plan.max_total_num_tokens < plain.max_total_num_tokens


def test_a_block_attends_as_the_heads_of_one_row(tmp_path: Path) -> None:
    config = configs()["qwen3"]
    text = {key: config[key] for key in ("hidden_size", "vocab_size")}
    target, draft = write(tmp_path / "target", config), write(tmp_path / "draft", DFLASH | text)
    flags: dict[str, Any] = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": draft}
    plain, plan = plan_of(target), plan_of(target, **flags)
    layers = config["num_hidden_layers"]
    # As many captures as layers, from the second layer to the third from the end.
    assert plan.aux_layers[0] == 1 and plan.aux_layers[-1] == layers - 3 and len(plan.aux_layers) == 5
    shapes = {(shape.num_heads, shape.num_kv_heads) for shape in plan.attention_shapes}
    assert (32 * 16, 8) in shapes and len(shapes) == 2
    rows = plan.max_running_requests * 4 * 32 * 16 * 128
    assert plan.memory.attention > plain.memory.attention + rows, "partial results of the blocks' heads"
    assert plan.uncertain_slots == 2 * 16 - 1 + 16
    assert plan_of(target, **flags, speculative_num_draft_tokens=4).uncertain_slots == 3 + 4 + 16
    with pytest.raises(UserError, match="pass --attention-backend triton"):
        args = ServerArgs.from_kwargs(
            model_path=target, load_format="dummy", attention_backend="flashinfer", page_size=16, **flags
        )
        arch, packages = arch_by_name("rtx-pro-6000-server"), PACKAGES | {"flashinfer"}
        make_plan(args, ModelConfig.from_server_args(args), arch, 94 * GIB, packages)


def test_a_trial_reads_the_drafts_block_once_for_kernels_and_once_for_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sizes are tried."""
    read: list[str | None] = []

    def counted(args: ServerArgs) -> TrainedBlock:
        read.append(args.speculative_draft_model_path)
        return trained_block(args)

    monkeypatch.setattr("sglang.srt.plan.speculation.trained_block", counted)
    config = configs()["qwen3"]
    text = {key: config[key] for key in ("hidden_size", "vocab_size")}
    target, draft = write(tmp_path / "target", config), write(tmp_path / "draft", DFLASH | text)
    plan_of(target, speculative_algorithm="DFLASH", speculative_draft_model_path=draft)
    assert read == [draft] * 2


def test_windows_have_room_for_what_drafts_reserve(tmp_path: Path) -> None:
    target = write(tmp_path / "target", configs()["gpt_oss"])
    flags: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    plain, plan = plan_of(target, tp_size=4), plan_of(target, tp_size=4, **flags)
    assert plain.uncertain_slots == 1 and plan.uncertain_slots == 7 + 8
    requests = plan.max_running_requests
    assert plan.windows[0].tokens >= requests * (plan.windows[0].window - 1 + plan.uncertain_slots)
    assert plain.windows[0].tokens >= plain.max_running_requests * plain.windows[0].window
