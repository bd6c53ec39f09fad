"""Every form with every choice of quantized modules, and every way to spell or forget which are not, against
transformers with the weights that the checkpoint stands for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file

from sglang.srt.distributed import parallel_state
from sglang.srt.plan.ranks import RankLayout

from .format_matrix import FORMATS, SELECTIONS, SPELLINGS, Case, write_case
from .harness import TinyRunner, hf_logits, plan_for, random_tokens, reference_of

TOKENS = random_tokens(19, seed=1)
TOLERANCE = {"rtol": 0.0, "atol": 5e-4}
HYBRIDS = (("qwen3_next_wide", False), ("qwen3_5_wide", True), ("qwen3_5_moe_wide", True))
OTHERS = (
    *("llama_wide", "qwen3_moe_wide", "glm4_wide", "glm4_moe_wide", "deepseek_v3_wide", "minimax_m2_wide"),
    *("hy_v3_wide", "nemotron_h_wide", "kimi_linear_wide", "gemma4_moe_wide", "gemma4_small_wide", "laguna_wide"),
    *("step3p7_wide", "muse_glimmer_wide", "qwen4_exp_wide", "glm_moe_dsa_wide", "mixtral", "qwen2_moe"),
)
NARROW = ("mixtral", "qwen2_moe")
"""Whose projections are less than a block, which no product of several of them takes."""
NVFP4 = ("modelopt_nvfp4", "compressed_nvfp4", "compressed_nvfp4_a16")


def _covering() -> list[Case]:
    """Every form, choice and spelling at least once; every hybrid with quantized gates and with products in pieces, in
    NVFP4."""
    cases = [
        Case(form, model, selection, spelling, wrapped)
        for (model, wrapped), (form, selection, spelling) in zip(
            itertools.cycle(HYBRIDS),
            zip(FORMATS, itertools.cycle(SELECTIONS), itertools.cycle([*SPELLINGS, "not at all"]), strict=False),
            strict=False,
        )
    ]
    choices = ("everything", "some of a product")
    for i, ((model, wrapped), selection) in enumerate(itertools.product(HYBRIDS, choices)):
        cases.append(Case(NVFP4[i % 2], model, selection, [*SPELLINGS][i % len(SPELLINGS)], wrapped))
    return list(dict.fromkeys(cases))


def _further() -> list[Case]:
    hybrids = (
        Case(form, model, selection, spelling, wrapped)
        for form, (model, wrapped), selection, spelling in itertools.product(FORMATS, HYBRIDS, SELECTIONS, SPELLINGS)
        if form in NVFP4 or spelling in ("by name", "not at all")
    )
    others = (
        Case(form, model, selection, "not at all")
        for form, model, selection in itertools.product(
            ("compressed_nvfp4", "compressed_int4_g32", "awq_g32", "compressed_fp8_channel", "fp8_block"),
            OTHERS,
            ("experts", "everything", "some of a product"),
        )
        if form != "fp8_block" or model not in NARROW
        if (form, model) != ("compressed_int4_g32", "qwen2_moe") or selection == "experts"  # 48 columns, groups of 32
    )
    return [*hybrids, *others]


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of TOKENS: a prompt in two chunks, then token by token."""
    extended = [*runner.extend({2: TOKENS[:9]}), *runner.extend({2: TOKENS[9:16]})]
    return torch.cat((*extended, *(runner.decode({2: token}) for token in TOKENS[16:])))


def check(case: Case, folder: Path) -> None:
    reference = write_case(case, folder)
    want = hf_logits(reference_of(reference), TOKENS)
    plan = plan_for(folder / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), want, **TOLERANCE, msg=lambda text: f"{case}: {text}")
    allocated = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert allocated == plan.weight_bytes(), f"{case}: the plan counts other bytes than are allocated"


@pytest.mark.parametrize("case", _covering(), ids=str)
def test_it_computes_what_it_stands_for(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", [*dict.fromkeys(case.form for case in _further())])
def test_every_pair_computes_what_it_stands_for(form: str, tmp_path: Path) -> None:
    failed = []
    for i, case in enumerate(case for case in _further() if case.form == form):
        try:
            check(case, tmp_path / str(i))
        except Exception as error:
            failed.append(f"{case}: {error!r:.300}")
    assert not failed, "\n".join(failed)


def test_the_matrix_quantizes_what_it_says(tmp_path: Path) -> None:
    """Gates of recurrent layers are quantized with everything, and nothing that is left alone is named."""
    write_case(Case("compressed_nvfp4", "qwen3_5_moe_wide", "everything", "not at all", True), tmp_path / "all")
    write_case(Case("compressed_nvfp4", "qwen3_5_moe_wide", "experts", "not at all", True), tmp_path / "experts")
    gates = "model.language_model.layers.0.linear_attn.in_proj_{}.weight_packed"
    stored = load_file(tmp_path / "all" / "quantized" / "model.safetensors")
    assert {gates.format("a"), gates.format("b")} < stored.keys()
    stored = load_file(tmp_path / "experts" / "quantized" / "model.safetensors")
    packed = [name for name in stored if name.endswith("weight_packed")]
    assert packed and all(".experts." in name for name in packed)
    assert '"ignore": ["lm_head"]' in (tmp_path / "experts" / "quantized" / "config.json").read_text()


RANK_CASES = (
    *(Case("compressed_nvfp4", model, "everything", "not at all", wrapped) for model, wrapped in HYBRIDS),
    *(Case("modelopt_nvfp4", model, "some of a product", "not at all", wrapped) for model, wrapped in HYBRIDS),
    Case("awq_g32", "qwen3_next_wide", "everything", "not at all"),
    Case("fp8_block", "qwen3_5_wide", "some of a product", "by name", True),
)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/rendezvous")
    for i in range(len(RANK_CASES)):
        plan = plan_for(folder / str(i) / "quantized", tp_size=2)
        runner = TinyRunner(plan)
        assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
        torch.save(steps(runner), folder / f"{i}-{rank}.pt")
    parallel_state.shutdown()


def test_two_ranks(tmp_path: Path) -> None:
    for i, case in enumerate(RANK_CASES):
        write_case(case, tmp_path / str(i))
    run_ranks(_rank, (tmp_path,), 2)
    for i, case in enumerate(RANK_CASES):
        want = steps(TinyRunner(plan_for(tmp_path / str(i) / "quantized")))
        for rank in range(2):
            got = torch.load(tmp_path / f"{i}-{rank}.pt")
            torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda text, case=case: f"{case}: {text}")
