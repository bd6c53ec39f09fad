"""Muse-Glimmer's assistant drafts in the scheduler: the logits of its draft tokens are those of transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rank_processes import run_ranks
from torch import Tensor

from sglang.srt.distributed import parallel_state
from sglang.srt.drafts.block.drafter import DraftBlock
from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.plan.ranks import RankLayout
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.models.draft_harness import DraftRunner, plan_with_draft
from srt.models.draft_references import Target
from srt.models.harness import random_tokens, save_tiny
from srt.models.muse_assistant import BLOCK, Assistant, save_assistant

from .test_autoregressive_draft import scheduler_of

PROMPT, NEW_TOKENS = random_tokens(20, seed=4), 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    folder = tmp_path_factory.mktemp("target")
    return folder, Target(save_tiny("muse_glimmer", folder))


def drafting(folder: Path, draft: Path, **options: Any) -> Scheduler:
    return scheduler_of(
        folder,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(draft),
        speculative_num_draft_tokens=BLOCK,
        chunked_prefill_size=16,
        disable_overlap_schedule=True,
        **options,
    )


def answer(scheduler: Scheduler) -> list[int]:
    collector = Collector()
    add(scheduler, request("a", PROMPT, NEW_TOKENS, temperature=0.0, ignore_eos=True))
    run_to_end(scheduler, collector)
    return collector.tokens["a"]


@pytest.mark.parametrize("own_masks", [False, True])
def test_logits_are_those_of_transformers(own_masks: bool, target: tuple[Path, Target], tmp_path: Path) -> None:
    """With windows that the context outgrows; and by the class's own masks with windows that it does not."""
    folder, reference_of_target = target
    window = len(PROMPT) + NEW_TOKENS + BLOCK if own_masks else 12
    reference = Assistant(save_assistant(tmp_path, sliding_window=window), reference_of_target, own_masks)
    scheduler = drafting(folder, tmp_path)
    drafter = scheduler.runner.drafter
    assert isinstance(drafter, DraftBlock)
    made: list[Tensor] = []
    seen: list[tuple[int, Tensor]] = []
    propose, logits = drafter.propose, drafter.model.logits

    def spy(step: DraftStep, num_speculative_tokens: int) -> Tensor:
        draft_tokens = propose(step, num_speculative_tokens)
        if num_speculative_tokens and int(step.slots[0]) and int(step.lens[0]) + BLOCK <= int(step.ends[0]):
            seen.append((int(step.lens[0]), made[-1]))
        return draft_tokens

    def kept(state: Tensor) -> Tensor:
        made.append(logits(state).clone())
        return made[-1]

    drafter.propose = spy  # type: ignore[method-assign]
    drafter.model.logits = kept  # type: ignore[method-assign]
    text = [*PROMPT, *answer(scheduler)]
    assert text == [*PROMPT, *answer(scheduler_of(folder))]
    assert len(seen) > 5
    for length, got in seen:
        want = reference(text[: length + 1], BLOCK - 1)
        assert want.std() > 0.1
        torch.testing.assert_close(got[: BLOCK - 1], want, rtol=0.0, atol=2e-4)


def changed(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "left out"}))


def test_a_config_may_leave_out_what_the_published_one_says(target: tuple[Path, Target], tmp_path: Path) -> None:
    """Then the sizes are those of the published assistant, which this target does not have; all layers have windows."""
    save_assistant(tmp_path, layer_types=["sliding_attention"] * 3)
    changed(tmp_path, layer_types="left out", rms_norm_eps=None)
    draft = plan_with_draft(target[0], "DFLASH", tmp_path).draft.description
    assert [layer.mixer.window for layer in draft.model.layers] == [12] * 3  # type: ignore[union-attr]
    assert draft.model.norm_eps == 1e-5 and draft.aux_layers == (1, 3, 6) and draft.plain_ends
    changed(tmp_path, target_layer_ids="left out")
    with pytest.raises(UserError, match=r"target_layer_ids \[1, 13, 25, 37, 49\] are not all layers"):
        plan_with_draft(target[0], "DFLASH", tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["MuseGlimmerAssistant2"]}, "MuseGlimmerAssistant2 is not supported for DFLASH"),
        ({"target_layer_ids": [1, 8]}, "not all layers of the model, which has 8"),
        ({"mask_token_id": 1 << 20}, "mask_token_id 1048576 is no token"),
        ({"hidden_size": 32}, "hidden_size 32 is not the target's"),
        ({"block_size": 0}, "block_size"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"hidden_act": "relu6"}, "hidden_act = 'relu6' is not supported"),
    ],
)
def test_other_configs_are_refused(
    keys: dict[str, Any], message: str, target: tuple[Path, Target], tmp_path: Path
) -> None:
    save_assistant(tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        plan_with_draft(target[0], "DFLASH", tmp_path)


@pytest.mark.parametrize("algorithm", ["DSPARK", "EAGLE", "EAGLE3", "STANDALONE"])
def test_it_is_asked_for_as_dflash(algorithm: str, target: tuple[Path, Target], tmp_path: Path) -> None:
    save_assistant(tmp_path)
    with pytest.raises(UserError, match="drafts with --speculative-algorithm DFLASH"):
        plan_with_draft(target[0], algorithm, tmp_path)


def test_it_drafts_for_muse_glimmer_alone(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "target", num_hidden_layers=7)
    save_assistant(tmp_path / "draft")
    with pytest.raises(UserError, match="drafts for Muse-Glimmer, and the model is Qwen3ForCausalLM"):
        plan_with_draft(tmp_path / "target", "DFLASH", tmp_path / "draft")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("encoder.output_norm_enc.weight", None, "lacks weights of the model: encoder.output_norm_enc.weight"),
        ("encoder.fc.weight", (64, 3), "tensor encoder.fc.weight has shape"),
        ("layers.1.self_attn.k_norm.weight", None, "lacks weights of the model: layers.1.self_attn.k_norm.weight"),
        ("hidden_norm.weight", (64,), "does not have: hidden_norm.weight"),
    ],
)
def test_other_tensors_are_named(
    name: str, shape: tuple[int, ...] | None, message: str, target: tuple[Path, Target], tmp_path: Path
) -> None:
    save_assistant(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(target[0], "DFLASH", tmp_path))


def test_a_stage_without_the_embedding_has_a_copy(target: tuple[Path, Target], tmp_path: Path) -> None:
    """Which is normed as the target's is; the assistant reads it without."""
    save_assistant(tmp_path)
    plan, ids = plan_with_draft(target[0], "DFLASH", tmp_path), torch.tensor(PROMPT)
    runner = DraftRunner(plan)
    shared, stored = runner.model.embed, target[1].embedded(PROMPT).detach()
    assert shared is not None and (shared(ids) - stored).abs().max() > 0.1
    runner.model.embed = None
    runner.load_draft(plan)
    copied = runner.draft.parts.copied
    assert copied is not None and torch.equal(copied.embedding(ids), shared(ids))
    torch.testing.assert_close(runner.draft.parts.embedding(ids), stored)


def _rank(rank: int, folder: Path, draft: Path, out: Path) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{out}/rendezvous")
    plan = plan_with_draft(folder, "DFLASH", draft, tp_size=2)
    runner = DraftRunner(plan)
    with torch.inference_mode():
        rows = runner.draft.parts.embedding(torch.tensor(PROMPT))
        torch.save((rows, runner.draft.logits(rows)), out / f"{rank}.pt")
    sizes = [param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values()]
    assert sum(sizes) == plan.draft.weight_bytes("float32")
    parallel_state.shutdown()


@pytest.mark.thorough
def test_two_ranks_read_the_rows_and_the_head_of_one(target: tuple[Path, Target], tmp_path: Path) -> None:
    save_assistant(tmp_path / "draft")
    run_ranks(_rank, (target[0], tmp_path / "draft", tmp_path), 2)
    stored = target[1].embedded(PROMPT).detach()
    for rank in range(2):
        rows, logits = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(rows, stored)
        torch.testing.assert_close(logits, target[1].logits(stored).detach(), rtol=0.0, atol=1e-4)


def test_the_plan_counts_its_weights(target: tuple[Path, Target], tmp_path: Path) -> None:
    model = save_assistant(tmp_path)
    plan = plan_with_draft(target[0], "DFLASH", tmp_path)
    DraftRunner(plan)
    assert plan.draft.weight_bytes("float32") == sum(param.nbytes for param in model.parameters())
