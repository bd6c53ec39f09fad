"""Drafts behind quantized targets, on several ranks, and behind the stages of a pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.stages import cut_stages

from .draft_harness import DraftRunner, PlanWithDraft, check_proposals, plan_with_draft
from .draft_references import Target
from .harness import random_tokens, save_tiny
from .quantized_checkpoints import FORMS, save_quantized
from .test_eagle3_drafts import CONFIG, save, weights
from .test_mtp_drafts import EH, Mtp, build
from .test_other_drafts import MLA_CONFIG, latent_weights
from .trellis_checkpoints import exl3

TOKENS = random_tokens(30, seed=3)


# --- quantized targets ------------------------------------------------------------------------------------------------


@pytest.mark.values
@pytest.mark.parametrize("draft_is_quantized", [True, False])
@pytest.mark.parametrize("form", ["fp8_block", "modelopt_nvfp4", "compressed_fp8_channel", "exl3"])
def test_a_draft_is_stored_as_its_tensors_say(form: str, draft_is_quantized: bool, tmp_path: Path) -> None:
    """No list of exceptions names the draft's layer: its tensors' types tell whether it was quantized."""
    reference_folder = save_quantized("glm4_moe_wide", exl3() if form == "exl3" else FORMS[form], tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    folder, last, at = tmp_path / "quantized", "model.layers.2.", "model.layers.3."
    tensors = load_file(folder / "model.safetensors")
    layer = tensors if draft_is_quantized else load_file(reference_folder / "model.safetensors")
    copied = {at + name.removeprefix(last): tensor.clone() for name, tensor in layer.items() if name.startswith(last)}
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(2)
    names = [f"{at}{name}.weight" for name in EH.names]
    copied[names[0]] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.1
    copied |= {name: torch.rand(hidden, generator=generator) + 0.5 for name in names[1:]}
    save_file(tensors | copied, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))

    def norm(key: str) -> torch.nn.Module:
        module = type(model.model.norm)(hidden, eps=model.config.rms_norm_eps)
        module.weight.data.copy_(copied[key])
        return module

    published = replace(EH, names=tuple(name.removesuffix(".weight") for name in names))
    reference = Mtp(published, copied, Target(model), [model.model.layers[2]], norm)
    plan = plan_with_draft(folder, "EAGLE")
    (scheme,) = {
        quant.scheme if quant else None
        for matrix, quant in plan.draft.weights.matrices()
        if matrix.quantized and matrix.name != "fc"
    }
    assert (scheme is not None) == draft_is_quantized
    check_proposals(DraftRunner(plan), reference, TOKENS, 1e-3)


# --- ranks ------------------------------------------------------------------------------------------------------------


def save_pairs(folder: Path) -> dict[str, tuple[str, Path, Path | None]]:
    """name -> (algorithm, target, draft)."""
    save_tiny("qwen3", folder / "qwen3", num_hidden_layers=7)
    save(folder / "eagle3", CONFIG, weights(CONFIG))
    save(folder / "latent", MLA_CONFIG, latent_weights())
    save_tiny("qwen2", folder / "small")
    for name in ("glm4_moe", "qwen3_5_moe"):
        (folder / name).mkdir()
        build(name, folder / name)
    target = folder / "qwen3"
    return {
        "eagle3": ("EAGLE3", target, folder / "eagle3"),
        "latent": ("EAGLE3", target, folder / "latent"),
        "standalone": ("STANDALONE", target, folder / "small"),
        **{name: ("EAGLE", folder / name, None) for name in ("glm4_moe", "qwen3_5_moe")},
    }


def draft_tokens(runner: DraftRunner) -> Tensor:
    first = runner.step({4: TOKENS[:13], 2: TOKENS[5:9]}, {4: TOKENS[13], 2: 7})
    rows = [runner.draft_token(2, first[2], 7, 2)]
    state = runner.step({4: TOKENS[13:-1]}, {4: TOKENS[-1]})[4]
    return torch.cat((*rows, runner.draft_token(4, state, TOKENS[-1], 3)))


def _rank(rank: int, ranks: RankLayout, folder: Path, pairs: dict[str, tuple[str, Path, Path | None]]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(ranks, rank, "gloo", f"file://{folder}/rendezvous{ranks.ep_size}")
    for name, (algorithm, target, draft) in pairs.items():
        plan = plan_with_draft(target, algorithm, draft, tp_size=ranks.tp_size, ep_size=ranks.ep_size)
        runner = DraftRunner(plan)
        held = sum(p.tensor.nbytes for loadable, _ in runner.draft.loadables() for p in loadable.params.values())
        assert held == plan.draft.weight_bytes("float32"), f"{name}: the plan counts other bytes than a rank allocates"
        torch.save(draft_tokens(runner), folder / f"{name}{rank}.pt")
    parallel_state.shutdown()


def test_ranks_agree_with_one_rank(tmp_path: Path) -> None:
    pairs = save_pairs(tmp_path)
    wanted = {
        name: draft_tokens(DraftRunner(plan_with_draft(target, kind, draft)))
        for name, (kind, target, draft) in pairs.items()
    }
    with_experts = {name: pair for name, pair in pairs.items() if pair[2] is None}
    for ranks, names in ((RankLayout(2), pairs), (RankLayout(2, 2), with_experts)):
        run_ranks(_rank, (ranks, tmp_path, names), 2)
        for name in names:
            for rank in range(2):
                got = torch.load(tmp_path / f"{name}{rank}.pt")
                torch.testing.assert_close(got, wanted[name], rtol=0.0, atol=1e-3)


# --- stages -----------------------------------------------------------------------------------------------------------


def stage_plan(plan: PlanWithDraft, number: int, count: int) -> PlanWithDraft:
    stages = cut_stages(replace(plan.weights, ranks=RankLayout(pp_size=count)), "float32")
    staged = replace(plan)
    staged.__dict__.update(description=stages[number].model, weights=plan.weights.select_stage(stages[number].model))
    staged.__dict__["draft"] = plan.draft
    return staged


@pytest.mark.parametrize("draft", ["eagle3", "mtp"])
def test_what_is_captured_travels_through_the_stages(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage has a copy of the embedding, and drafts what one stage drafts."""
    if draft == "eagle3":
        save_tiny("qwen3", tmp_path / "target", num_hidden_layers=7)
        head = save(
            tmp_path / "head",
            CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
            weights(CONFIG),
        )
        plan = plan_with_draft(tmp_path / "target", "EAGLE3", head)
    else:
        (tmp_path / "target").mkdir()
        build("glm4_moe", tmp_path / "target")
        plan = plan_with_draft(tmp_path / "target", "EAGLE")
    whole = DraftRunner(plan)
    count = 3
    runners = []
    for number in range(count):
        groups = replace(parallel_state.groups(), pp=Group(number, count))
        monkeypatch.setattr(parallel_state, "groups", lambda groups=groups: groups)
        kind = DraftRunner if number == count - 1 else StageRunner
        runners.append(kind(stage_plan(plan, number, count)))
    last = runners[-1]
    assert isinstance(last, DraftRunner) and last.model.embed is None
    with torch.inference_mode():
        rows, states = None, []
        for runner in runners:
            batch = runner.batch_of_prompts({4: TOKENS[:-1]})
            rows = runner.model.compute(batch, rows)
        batch = replace(batch, input_ids=torch.tensor(TOKENS[1:]))
        state = last.draft(batch, last.draft.features(rows, batch.aux_hidden_states))[-1:]
        states.append(last.draft_token(4, state, TOKENS[-1], 3))
    wanted = whole.step({4: TOKENS[:-1]}, {4: TOKENS[-1]})[4]
    torch.testing.assert_close(states[0], whole.draft_token(4, wanted, TOKENS[-1], 3), rtol=0.0, atol=1e-4)


class StageRunner(DraftRunner):
    """A stage before the last one: it has no draft."""

    def load_draft(self, plan: PlanWithDraft) -> None:
        pass
