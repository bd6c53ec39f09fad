"""EXL3 checkpoints with random trellises on a CPU, against transformers with the weights they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.configs.trellis import read_trellises
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.trellis_linear import TrellisLinear
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.ranks import RankLayout
from srt.managers.test_families_in_the_scheduler import check as check_tokens
from srt.managers.test_families_in_the_scheduler import scheduler

from .harness import TinyRunner, blocks_of, hf_logits, plan_for, random_tokens, reference_of
from .quantized_checkpoints import PROJECTIONS, save_quantized
from .trellis_checkpoints import exl3

TOKENS = random_tokens(23, seed=1)
HYBRID = (*PROJECTIONS, "in_proj_qkv", "in_proj_z", "out_proj")
WITH_HEAD = (*PROJECTIONS, "lm_head")
MIXED = ((8, "mul1"), (7, "mul1"), (6, "mul1"))


def steps(runner: TinyRunner) -> torch.Tensor:
    extended = runner.extend({2: TOKENS[:20]})
    return torch.cat((*extended, *(runner.decode({2: token}) for token in TOKENS[20:])))


def wanted(reference: Path) -> torch.Tensor:
    return hf_logits(reference_of(reference), TOKENS)


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


def test_a_head_whose_rows_end_within_blocks(tmp_path: Path) -> None:
    """And a matrix whose checkpoint keeps 16 bits."""
    reference = save_quantized(
        "qwen3_wide", exl3(), tmp_path, keep=("layers.1.mlp.down_proj",), quantized=WITH_HEAD, vocab_size=300
    )
    check(tmp_path, reference)


def test_greedy_tokens_in_the_scheduler(tmp_path: Path) -> None:
    """Among other requests, in chunks, with little memory: those of the dense model with equal weights."""
    reference = save_quantized("qwen3_wide", exl3(MIXED), tmp_path, quantized=WITH_HEAD, num_hidden_layers=3)
    served = scheduler(
        tmp_path / "quantized", max_total_tokens=112, schedule_conservativeness=0.01, chunked_prefill_size=16
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    check_tokens(model, served, [random_tokens(12 + 6 * seed, seed) for seed in range(4)], 8)


def _rank(rank: int, folder: Path, ep_size: int, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(2, ep_size), rank, "gloo", f"file://{folder}/rendezvous{ep_size}")
    for name in names:
        plan = plan_for(folder / name / "quantized", tp_size=2, ep_size=ep_size)
        runner = TinyRunner(plan)
        assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
        torch.save(steps(runner), folder / f"{name}{rank}.pt")
    parallel_state.shutdown()


RANKED: dict[str, dict[str, int]] = {
    "qwen3_wide": {"vocab_size": 251},
    "qwen3_moe_wide": {"moe_intermediate_size": 256},
    "qwen3_5_wide": {},
}


@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks(ep_size: int, tmp_path: Path) -> None:
    """The head's 251 rows begin and end within blocks. Ranks divide the experts' dims, or have whole experts."""
    names = tuple(RANKED) if ep_size == 1 else ("qwen3_moe_wide",)
    for name in names:
        (tmp_path / name).mkdir()
        form = exl3(taller=(10, "mul1")) if "moe" in name else exl3(MIXED)
        save_quantized(name, form, tmp_path / name, quantized=(*HYBRID, "lm_head"), **RANKED[name])
    run_ranks(_rank, (tmp_path, ep_size, names), 2)
    for name in names:
        want = steps(TinyRunner(plan_for(tmp_path / name / "quantized")))
        for rank in range(2):
            got = torch.load(tmp_path / f"{name}{rank}.pt")
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.std()))


def test_a_share_that_cuts_a_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized("llama_wide", exl3(), tmp_path)
    groups = groups_of(RankLayout(8), 1)
    monkeypatch.setattr(parallel_state, "groups", lambda: groups)
    plan = plan_for(tmp_path / "quantized")
    with pytest.raises(
        UserError,
        match="o_proj: 128 columns are one block of its trellis, but with --tp-size 8 a rank holds columns 64",
    ):
        CausalLM(plan, device="meta")


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    save_quantized("qwen3_wide", exl3(), folder)
    file = folder / "quantized" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder / "quantized"


def test_another_multiplier_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.mul1"] += 1

    folder = _changed(tmp_path, change)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.mul1 is 0x83dcd12e: only the multiplier 0x83dcd12d"):
        TinyRunner(plan_for(folder))


def test_other_words_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.trellis"] = torch.zeros(16, 32, 60, dtype=torch.int16)

    folder = _changed(tmp_path, change)
    with pytest.raises(UserError, match=r"up_proj.trellis has shape \[16, 32, 60\]: a trellis has words of 1 to 8"):
        plan_for(folder)


def test_a_config_alone_has_its_average_bits() -> None:
    """In whole bits, or with MUL1 halves, by layer."""
    for codebook, bits in (("mul1", 3.25), ("mcg", 4.5), ("3inst", 2.125)):
        trellises = read_trellises({"bits": bits, "head_bits": 6, "codebook": codebook}, "config.json")
        halves = [trellises.of(f"layers.{i}.mlp.up_proj").half_bits for i in range(48)]
        assert sum(halves) / 96 == bits and max(halves) - min(halves) == (1 if codebook == "mul1" else 2)
        assert trellises.of("lm_head").half_bits == 12


@pytest.mark.parametrize("values", [{"bits": 9}, {"bits": "4"}, {}, {"bits": 4, "codebook": "abc"}])
def test_a_config_without_known_bits_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"config.json: (bits must be a number|codebook 'abc')"):
        read_trellises(values, "config.json")


FAMILIES = {
    "qwen3_moe_wide": PROJECTIONS,
    "qwen3_5_wide": HYBRID,
    "qwen3_5_moe_wide": HYBRID,
    "glm4_moe_wide": PROJECTIONS,
    "glm_moe_dsa_wide": PROJECTIONS,
    "glm5_next_wide": (*PROJECTIONS, "b_proj"),
    "mimo_v2_wide": PROJECTIONS,
    "minimax_m2_wide": PROJECTIONS,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Each expert has trellises of its own, down with more bits than gate and up."""
    reference = save_quantized(name, exl3(taller=(9, "mul1")), tmp_path, quantized=FAMILIES[name])
    check(tmp_path, reference)


def test_experts_with_other_bits_are_refused(tmp_path: Path) -> None:
    save_quantized("qwen3_moe_wide", exl3(((8, "mul1"), (6, "mul1"))), tmp_path)
    with pytest.raises(UserError, match=r"tensor .*experts.*_proj.trellis has shape \[\d+, \d+, \d+\], but"):
        TinyRunner(plan_for(tmp_path / "quantized"))
