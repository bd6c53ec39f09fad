"""Gemma 4's assistants behind a real scheduler: draft tokens are those of transformers, tokens those of the plain
run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_processes import run_ranks

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.drafts.kv_sharing.drafter import KVSharingAssistant
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan, create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.plan.plan import make_plan
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, prompts, run, server_args
from srt.models.harness import GEMMA4, SIZES, randomize, save_tiny

TARGETS = ("gemma4", "gemma4_moe", "gemma4_small")
HIDDEN, WINDOW, DRAFT_TOKENS = 32, GEMMA4["sliding_window"], 3
GROUPS = {"use_ordered_embeddings": True, "num_centroids": 32, "centroid_intermediate_top_k": 6}


def save_assistant(folder: Path, text: dict[str, Any] | None = None, width: int = 64, **keys: Any) -> Any:
    """As published, with random weights: four layers, of which the last attends to everything. text: what is another in
    its text_config; width: of the target's hidden states."""
    changes = text or {}
    text = SIZES | GEMMA4 | {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4}
    text |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "vocab_size_per_layer_input": 0}
    text |= changes
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**text), backbone_hidden_size=width, **keys
    )
    torch.manual_seed(5)
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    randomize(model, False)
    model.get_input_embeddings().weight.data.mul_(10.0)  # which `randomize` makes small, for models without features
    if keys.get("use_ordered_embeddings"):
        model.masked_embedding.token_ordering.copy_(torch.randperm(SIZES["vocab_size"]))
    model.save_pretrained(folder)
    return model


def with_drafts(target: Path, draft: Path, **options: Any) -> ServerArgs:
    return server_args(
        target, speculative_algorithm="NEXTN", speculative_draft_model_path=str(draft),
        speculative_num_steps=DRAFT_TOKENS, **({"chunked_prefill_size": 16} | options),
    )  # fmt: skip


def scheduler_of(args: ServerArgs) -> Scheduler:
    return Scheduler(args, create_runner(args), StopChecker(None))


@torch.inference_mode()
def reference(target: Any, assistant: Any, tokens: list[int], given: list[int] | None = None) -> torch.Tensor:
    """Logits [GUESSES, V] behind the last token, which is not computed yet, each behind the greedy guess before it or
    the one that is given. Of a window, what the target keeps is seen."""
    ids = torch.tensor([tokens])
    out = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    first = {"sliding_attention": 1 - WINDOW, "full_attention": 0}
    shared = {kind: tuple(t[:, :, first[kind] :] for t in pair) for kind, pair in out.shared_kv_states.items()}
    last, hidden, logits = ids[:, -1:], out.hidden_states[-1][:, -1:], []
    for i in range(DRAFT_TOKENS):
        pair = torch.cat((target.get_input_embeddings()(last), hidden), dim=-1)
        position = torch.tensor([[len(tokens) - 1]])
        step = assistant(inputs_embeds=pair, position_ids=position, shared_kv_states=shared)
        logits.append(step.logits[0, 0])
        last, hidden = step.logits.argmax(-1) if given is None else torch.tensor([[given[i]]]), step.last_hidden_state
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("gemma4", {}), pytest.param("gemma4", GROUPS, marks=pytest.mark.thorough), ("gemma4_small", GROUPS)],
)
def test_draft_tokens_are_those_of_transformers(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    target, assistant = save_tiny(name, tmp_path / "target"), save_assistant(tmp_path / "draft", **keys)
    scheduler = scheduler_of(with_drafts(tmp_path / "target", tmp_path / "draft", disable_overlap_schedule=True))
    assert isinstance(scheduler.runner.drafter, KVSharingAssistant)
    (loadable, _), draft = *scheduler.runner.drafter.model.loadables(), scheduler.plan.draft
    assert draft is not None
    assert sum(param.tensor.nbytes for param in loadable.params.values()) == draft.weight_bytes("float32")
    seen = observed(scheduler)
    assert len(seen) > 20 and max(len(tokens) for tokens, _ in seen) > 3 * WINDOW
    for tokens, draft_tokens in seen:
        assert draft_tokens == reference(target, assistant, tokens).argmax(-1).tolist()


def observed(scheduler: Scheduler) -> list[tuple[list[int], list[int]]]:
    """Returns the draft tokens behind each prefix of greedy answers that was computed."""
    collector, seen = Collector(), []
    process = scheduler.process

    def spy(batch: Any) -> None:
        process(batch)
        collector.take(scheduler)
        for req in batch.sampled:
            if req.finish is None:
                last, *draft_tokens = scheduler.runner.state.next_tokens[req.slot].tolist()
                assert last == req.tokens[-1]
                seen.append((list(req.tokens), draft_tokens))

    scheduler.process = spy  # type: ignore[method-assign]
    for i, ids in enumerate(prompts()[:4]):
        add(scheduler, request(f"r{i}", ids, 12, ignore_eos=True, **GREEDY))
    run_to_end(scheduler, collector)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}, {"page_size": 16}])
def test_on_a_gpu(options: dict[str, Any], tmp_path: Path) -> None:
    """In 16 bits, on a model whose logits lie close together: plain torch on a CPU has a mean regret of 0.4 there."""
    target = save_tiny("gemma4_small_wide", tmp_path / "target")
    wide = {"num_attention_heads": 8, "head_dim": 64, "global_head_dim": 128}
    assistant = save_assistant(tmp_path / "draft", text=wide, width=256)
    on_gpu = {"device": "cuda", "dtype": "bfloat16", "cuda_graph_max_bs": 8, "mem_fraction_static": 0.2}
    args = with_drafts(tmp_path / "target", tmp_path / "draft", disable_overlap_schedule=True, **on_gpu, **options)
    seen = observed(scheduler_of(args))
    assert len(seen) > 20 and mean_regret(target, assistant, seen) < 0.8


def mean_regret(target: Any, assistant: Any, seen: list[tuple[list[int], list[int]]]) -> float:
    """By how much the logits of the draft tokens lie below the largest, in standard deviations; of random draft tokens:
    about
    3."""
    regrets = []
    for tokens, draft_tokens in seen:
        logits = reference(target, assistant, tokens, draft_tokens)
        chosen = logits.gather(1, torch.tensor(draft_tokens)[:, None])[:, 0]
        regrets.append((logits.amax(1) - chosen) / logits.std(1))
    return float(torch.stack(regrets).mean())


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param(name, params, id=f"{name}-{kind}", marks=[pytest.mark.thorough] * ((kind == "greedy") == (i > 0)))
        for i, name in enumerate(TARGETS)
        for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED))
    ],
)
def test_tokens_are_those_of_the_plain_run(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "target")
    save_assistant(tmp_path / "draft", **GROUPS)
    plain = run(scheduler_of(server_args(tmp_path / "target", chunked_prefill_size=16)), params)
    for graphs in (False, True):
        scheduler = scheduler_of(with_drafts(tmp_path / "target", tmp_path / "draft"))
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
            assert run(scheduler, params) == plain
            assert run(scheduler, params) == plain, "with prompts and outputs from the cache"
            assert_clean(scheduler)


LAYOUTS = {"tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}}


def _rank(rank: int, args: ServerArgs, layout: str, folder: Path) -> None:
    torch.set_num_threads(1)
    layout_args = replace(args, **LAYOUTS[layout])
    runner = create_runner(layout_args, rank, f"file://{folder}/rendezvous-{layout}")
    torch.save([run(Scheduler(layout_args, runner, StopChecker(None)), GREEDY)], folder / f"{layout}{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_tokens_of_one(layout: str, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    save_tiny("gemma4", tmp_path / "target", layer_types=kinds, num_hidden_layers=8)
    save_assistant(tmp_path / "draft", **GROUPS)
    plain = run(scheduler_of(server_args(tmp_path / "target", chunked_prefill_size=16)), GREEDY)
    run_ranks(_rank, (with_drafts(tmp_path / "target", tmp_path / "draft"), layout, tmp_path), 2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{layout}{rank}.pt") == [plain], f"rank {rank}"


def test_a_stage_without_the_caches_is_refused(tmp_path: Path) -> None:
    """The windows of this model are all in the first stage."""
    save_tiny("gemma4", tmp_path / "target")
    save_assistant(tmp_path / "draft")
    with pytest.raises(UserError, match="cache of layer 1, which is not in the pipeline's last stage .layers 3 and on"):
        args = replace(with_drafts(tmp_path / "target", tmp_path / "draft"), pp_size=2)
        make_plan(args, ModelConfig.from_server_args(args), arch_by_name("sm_120"), 90 << 30, frozenset({"triton"}))


@pytest.mark.parametrize(
    ("target", "keys", "message"),
    [
        ("gemma4", {"backbone_hidden_size": 40}, "backbone_hidden_size is 40, and the model has a hidden size of 64"),
        ("gemma4", GROUPS | {"num_centroids": 60}, "60 centroids"),
        ("qwen3", {}, "has a layer with a window and heads of 32, and Qwen3ForCausalLM has none"),
    ],
)
def test_assistants_of_other_models_are_refused(
    target: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(target, tmp_path / "target")
    save_assistant(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(UserError, match=message):
        create_plan(with_drafts(tmp_path / "target", tmp_path / "draft"))
