"""q, k and v as one tensor, stripe by stripe or once, in FP8 blocks: MiMo-V2.5 as published, and saved again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang import explain
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.fused_projections import TP_BLOCKS, with_tp_blocks
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.drafts.create import filled_draft
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization import reference
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.fused_rows import fused_rows, keep_groups
from sglang.srt.plan.ranks import HeadShares

from .depth_drafts import build_depths
from .harness import TinyRunner, plan_for
from .quantized_checkpoints import FORMS, save_quantized
from .ranks_alike import assert_ranks_alike
from .test_depth_drafts import planned
from .test_mimo_v2 import PUBLISHED, as_published
from .test_quantized import TOLERANCE, steps, wanted

PARTS = ("q_proj", "k_proj", "v_proj")
V2_5 = {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"}


def stripe_by_stripe(weights: list[torch.Tensor], tp_blocks: int) -> torch.Tensor:
    """q, k and v, one below the other in each of `tp_blocks` parts of their heads."""
    return torch.cat([part for chunks in zip(*(w.chunk(tp_blocks) for w in weights), strict=True) for part in chunks])


def taken_apart(fused: torch.Tensor, rows: list[int], tp_blocks: int) -> list[torch.Tensor]:
    parts = [tp_block.split([count // tp_blocks for count in rows]) for tp_block in fused.chunk(tp_blocks)]
    return [torch.cat(chunks) for chunks in zip(*parts, strict=True)]


def save_fused(folder: Path, tp_blocks: int, quantized: bool = True, **more: object) -> Path:
    """A MiMo-V2 with four KV heads in folder/quantized, and what it stands for in folder/reference, which is
    returned. Not `quantized`: attention stays in the model's type."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    save_quantized("mimo_v2_wide", FORMS["fp8_block"], folder, keep=PARTS, **heads, **more)  # type: ignore[arg-type]
    as_published(folder / "quantized")
    file = folder / "quantized" / "config.json"
    config = json.loads(file.read_text()) | V2_5
    if not quantized:
        config["quantization_config"]["modules_to_not_convert"].append("self_attn.qkv_proj")
    file.write_text(json.dumps(config))
    stored = load_file(folder / "quantized" / "model.safetensors")
    stored |= {f"{encoder}.0.weight": torch.ones(2) for encoder in ("visual", "audio_encoder", "speech_embeddings")}
    exact = load_file(folder / "reference" / "model.safetensors")
    for layer in range(3):
        at = f"model.layers.{layer}.self_attn."
        weights = [stored.pop(f"{at}{part}.weight") for part in PARTS]
        fused = stripe_by_stripe(weights, tp_blocks)
        if quantized:
            made = [reference.quantize(tp_block, SCHEMES["fp8_block"]) for tp_block in fused.chunk(tp_blocks)]
            stored[f"{at}qkv_proj.weight"] = torch.cat([tp_block.data for tp_block in made])
            stored[f"{at}qkv_proj.weight_scale_inv"] = torch.cat([tp_block.scale for tp_block in made])
            fused = torch.cat([reference.dequantize(tp_block, SCHEMES["fp8_block"]) for tp_block in made])
        else:
            stored[f"{at}qkv_proj.weight"] = fused
        apart = taken_apart(fused, [len(weight) for weight in weights], tp_blocks)
        exact |= {f"{at}{part}.weight": weight.contiguous() for part, weight in zip(PARTS, apart, strict=True)}
    save_file(stored, folder / "quantized" / "model.safetensors")
    save_file(exact, folder / "reference" / "model.safetensors", {"format": "pt"})
    return folder / "reference"


@pytest.mark.parametrize("tp_blocks", [1, 4])
def test_the_rows_of_scales_tell_the_stripes(tp_blocks: int, tmp_path: Path) -> None:
    """The full layer has 2,816 rows: 22 blocks, or 6 in each of four TP blocks. Layers with a window have 32 either
    way."""
    want = wanted(save_fused(tmp_path, tp_blocks))
    plan = plan_for(tmp_path / "quantized")
    mixers = [layer.mixer for layer in plan.description.layers]
    assert [mixer.stored.tp_blocks for mixer in mixers if isinstance(mixer, GQA)] == [tp_blocks] * 3
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize("tp_blocks", [1, 4])
def test_what_tells_nothing_is_refused_until_it_is_stated(
    tp_blocks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = wanted(save_fused(tmp_path, tp_blocks, quantized=False))
    folder = tmp_path / "quantized"
    with pytest.raises(UserError, match=r"without scales .* once or 4 times, and the wrong one .* State which"):
        plan_for(folder)
    assert explain.main(["--arch", "sm_120", "--model-path", str(folder)]) == 2
    assert f'{TP_BLOCKS}": 1' in capsys.readouterr().err
    stated = json.dumps({TP_BLOCKS: tp_blocks})
    plan = plan_for(folder, json_model_override_args=stated)
    torch.testing.assert_close(steps(TinyRunner(plan)), want, **TOLERANCE)
    with pytest.raises(UserError, match=f"{TP_BLOCKS} 3 does not divide the 4 KV heads"):
        _ = plan_for(folder, json_model_override_args=json.dumps({TP_BLOCKS: 3})).description


def header_only(folder: Path, config: dict[str, object], layers: dict[str, tuple[int, int]]) -> dict[str, object]:
    """config.json read beside tensors of so many rows and rows of scales, one column wide."""
    tensors = {}
    for module, (rows, scales) in layers.items():
        tensors[f"{module}.qkv_proj.weight"] = torch.zeros(rows, 1, dtype=torch.float8_e4m3fn)
        tensors[f"{module}.qkv_proj.weight_scale_inv"] = torch.zeros(scales, 1)
    save_file(tensors, folder / "model.safetensors")
    return with_tp_blocks(config | V2_5, folder)


FULL, WINDOW, DRAFT = (f"model.{name}.self_attn" for name in ("layers.0", "layers.1", "mtp.layers.0"))
V2_5_HEADS: dict[str, object] = {"num_key_value_heads": 4, "swa_num_key_value_heads": 8}
PRO_HEADS: dict[str, object] = {"num_key_value_heads": 8, "swa_num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("heads", "layers", "tp_blocks"),
    [
        (V2_5_HEADS, {FULL: (13568, 108), WINDOW: (14848, 116), DRAFT: (14848, 116)}, 4),
        (V2_5_HEADS, {FULL: (13568, 106), WINDOW: (14848, 116)}, 1),
        (PRO_HEADS, {FULL: (27136, 216), WINDOW: (27136, 216)}, 8),
        # Draft layers that are kept in 16 bits, or have a scale a row, follow too.
        (V2_5_HEADS, {FULL: (13568, 108), DRAFT: (14848, 14848)}, 4),
    ],
)
def test_published_shapes(
    heads: dict[str, object], layers: dict[str, tuple[int, int]], tp_blocks: int, tmp_path: Path
) -> None:
    assert header_only(tmp_path, heads, layers)[TP_BLOCKS] == tp_blocks


@pytest.mark.parametrize(
    ("heads", "layers", "message"),
    [
        (PRO_HEADS, {FULL: (27136, 212)}, r"27136 rows and 212 rows of scales, .* stored once or 4 times"),
        (V2_5_HEADS, {WINDOW: (14848, 116)}, r"14848 rows and 116 rows of scales, .* stored once or 4 times"),
        (V2_5_HEADS, {FULL: (13568, 107)}, r"107 rows of scales. Supported .* 106 with once, 108 with 4 times"),
        (
            V2_5_HEADS,
            {FULL: (13568, 108), "model.layers.5.self_attn": (13568, 106)},
            r"layers.5.* 106 rows of scales. Supported .* the same number of times in every layer",
        ),
    ],
)
def test_shapes_that_do_not_tell_are_refused(
    heads: dict[str, object], layers: dict[str, tuple[int, int]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        header_only(tmp_path, heads, layers)


def test_layouts_of_the_published_sizes(tmp_path: Path) -> None:
    """MiMo-V2.5 in four TP blocks stays in FP8 on the four and eight ranks that it is served on; on two, full layers
    have keys whose blocks go on in values, and are held in 16 bits."""
    config = json.loads(PUBLISHED.read_text()) | V2_5
    (tmp_path / "config.json").write_text(json.dumps(config))
    mixers = [layer.mixer for layer in plan_for(tmp_path).description.layers]
    dequantized = {
        size: sum(mixer.dequantized(size) for mixer in mixers if isinstance(mixer, GQA)) for size in (1, 2, 4, 8)
    }
    assert {mixer.stored.tp_blocks for mixer in mixers if isinstance(mixer, GQA)} == {4}
    assert dequantized == {1: 9, 2: 9, 4: 0, 8: 39}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("tp_blocks", [1, 2, 4, 8])
def test_ranks_have_the_rows_of_their_heads(tp_blocks: int, size: int) -> None:
    """16 query heads of 3 rows over 8 KV heads, with values of 2 rows: every row is numbered by part, head and row."""
    dims, counts = (3, 3, 2), (16, 8, 8)
    weights = [
        torch.tensor([[part, head, row] for head in range(count) for row in range(dim)])
        for part, (count, dim) in enumerate(zip(counts, dims, strict=True))
    ]
    fused = stripe_by_stripe(weights, tp_blocks)
    shares = HeadShares(16, 8, size)
    for rank in range(size):
        heads = (shares.heads(rank), shares.kv_heads(rank), shares.kv_heads(rank))
        rows = fused_rows(tuple(zip(heads, dims, strict=True)), tp_blocks)
        got = torch.cat([fused[share.run] for share in rows])
        want = [w[head.scale_dims(dim).run] for w, head, dim in zip(weights, heads, dims, strict=True)]
        assert torch.equal(got, torch.cat(want))
        assert sum(share.padded_count for share in rows) == sum(
            head.padded_count * dim for head, dim in zip(heads, dims, strict=True)
        )
        if tp_blocks == size:
            assert len(rows) == 1 and keep_groups(rows, 128)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_their_heads_of_every_stripe(size: int, tmp_path: Path) -> None:
    folders = {tp_blocks: tmp_path / str(tp_blocks) for tp_blocks in (1, 4)}
    for tp_blocks, folder in folders.items():
        folder.mkdir()
        save_fused(folder, tp_blocks, moe_intermediate_size=512)
    assert_ranks_alike(size, steps, TOLERANCE, *folders.values())


def test_draft_layers_are_stored_as_the_models(tmp_path: Path) -> None:
    build_depths("mimo_v2", tmp_path)
    plan = planned(tmp_path)
    apart = [loadable.params for loadable, _ in filled_draft(plan, load_model(plan)).loadables()]  # type: ignore[arg-type]
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".q_proj.weight")]:
        at = name.removesuffix("q_proj.weight")
        tensors[f"{at}qkv_proj.weight"] = stripe_by_stripe([tensors.pop(f"{at}{part}.weight") for part in PARTS], 2)
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | V2_5 | {TP_BLOCKS: 2}))
    plan = planned(tmp_path)
    for loadable, before in zip(
        (loadable for loadable, _ in filled_draft(plan, load_model(plan)).loadables()),  # type: ignore[arg-type]
        apart,
        strict=True,
    ):
        assert loadable.params.keys() == before.keys() and any(name.endswith("qkv.weight") for name in before)
        for name, param in loadable.params.items():
            assert torch.equal(param.tensor, before[name].tensor), name
