"""Drafts of models that see: each family with each kind of draft says what transformers says, and drafts read the
features of images where the target does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some_of
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.drafts.autoregressive import following_rows
from sglang.srt.drafts.parts import DraftParts
from sglang.srt.layers.forward_batch import ExtendRows, ForwardBatch
from sglang.srt.layers.input_rows import EmbeddingRows
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.models.causal_lm import CausalLM
from srt.managers.fake_runner import Collector, add, assert_clean, run_to_end

from . import test_dflash_drafts as dflash
from . import test_eagle3_drafts as eagle3
from . import test_other_drafts as others
from .harness import SIZES, save_tiny
from .media_draft_layers import add_depth_mtp, add_mtp, add_normed_mtp, add_pooled_mtp, add_stream_mtp
from .media_harness import (
    POOLED_FRAMES,
    SEEING,
    Prompt,
    again_in_graphs,
    greedy,
    media_request,
    save_seeing,
    seeing_scheduler,
)
from .muse_assistant import save_assistant

NEW_TOKENS = 16
CAPTURES = [0, 1]


def eagle3_head(folder: Path) -> Path:
    config = eagle3.CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURES}}
    return eagle3.save(folder, config, eagle3.weights(config, len(CAPTURES)))


def eagle3_latent_head(folder: Path) -> Path:
    config = others.MLA_CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return eagle3.save(folder, config, others.latent_weights())


def eagle1_head(folder: Path) -> Path:
    return eagle3.save(folder, others.EAGLE_CONFIG, others.eagle1_weights(bias=True))


def block_draft(folder: Path) -> Path:
    config = dflash.CONFIG | {"num_target_layers": 3}
    config |= {"dflash_config": {"mask_token_id": 201, "target_layer_ids": CAPTURES}}
    tensors = dflash.weights()
    tensors["fc.weight"] = tensors["fc.weight"][:, : len(CAPTURES) * SIZES["hidden_size"]].contiguous()
    return eagle3.save(folder, config, tensors)


def assistant(folder: Path) -> Path:
    save_assistant(folder, target_layer_ids=CAPTURES, num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    return folder


def model_of_its_own(folder: Path) -> Path:
    save_tiny("llama", folder)
    return folder


@dataclass(frozen=True)
class Kind:
    """A kind of draft. `make`: writes it to a folder and returns its path. `inside`: adds it to the checkpoints of
    these families, which alone have it. `only`: the family that it was made for; `not_of`: families that are refused
    by name."""

    algorithm: str
    make: Callable[[Path], Path] | None = None
    inside: dict[str, Callable[[Path], None]] | None = None
    not_of: tuple[str, ...] = ()
    only: str = ""

    def of(self, family: str) -> bool:
        if self.only:
            return family == self.only
        return family not in self.not_of and (self.inside is None or family in self.inside)


_SEVERAL_STREAMS = ("glm5_next", "qwen4_exp")
"""Families whose layers hand on several residual streams, of which EAGLE's drafts read one."""
_GATED_STREAMS = ("qwen4_exp",)
"""Families whose streams have no mean that block drafts read."""


KINDS = {
    "ngram": Kind("NGRAM"),
    "eagle": Kind("EAGLE", eagle1_head, not_of=_SEVERAL_STREAMS),
    "eagle3": Kind("EAGLE3", eagle3_head, not_of=_SEVERAL_STREAMS),
    "eagle3 with latents": Kind("EAGLE3", eagle3_latent_head, not_of=_SEVERAL_STREAMS),
    "dflash": Kind("DFLASH", block_draft, not_of=_GATED_STREAMS),
    "assistant": Kind("DFLASH", assistant, only="muse_glimmer"),
    "standalone": Kind("STANDALONE", model_of_its_own),
    "nextn": Kind(
        "NEXTN",
        inside={
            "qwen3_5": lambda folder: add_mtp(folder, layer=2),
            "glm5_next": add_pooled_mtp,
            "qwen4_exp": add_stream_mtp,
            "step3p7": add_depth_mtp,
            "inkling_mm_model": add_normed_mtp,
        },
    ),
}
CELLS = [(family, kind) for family in SEEING for kind, draft in KINDS.items() if draft.of(family)]
_AT_ONCE = {
    ("kimi_k25", "eagle3 with latents"),
    ("qwen3_vl", "eagle3"),
    ("qwen3_5", "nextn"),
    ("gemma4", "dflash"),
    ("muse_glimmer", "assistant"),
    ("glm4v_moe", "standalone"),
    ("qwen3_vl_moe", "ngram"),
}


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp_size": 2},
    "TP2, shared": {"tp_size": 2, "mm_enable_dp_encoder": True},
    "PP2": {"pp_size": 2},
}
NO_STAGES = ("gemma4_per_layer",)
"""Those with layers that attend to keys and values of earlier ones."""


def options_of(family: str, kind: str, folder: Path, draft_folder: Path) -> dict[str, Any]:
    """Writes the draft, and returns the options of a server that uses it. folder: of the model."""
    draft = KINDS[kind]
    options: dict[str, Any] = {"speculative_algorithm": draft.algorithm, "speculative_num_draft_tokens": 4}
    if draft.inside is not None:
        draft.inside[family](folder)
    if draft.make is not None:
        options["speculative_draft_model_path"] = str(draft.make(draft_folder))
    return options


def prompts_of(family: str) -> dict[str, Prompt]:
    video = Prompt().text(4, 7).image((3, 4, 4), 30, pooled=POOLED_FRAMES.get(family, 1))
    return {
        "image": Prompt().text(5, 1).image((1, 4, 6), 1).text(4, 2),
        "video": video.text(5, 8).image((1, 4, 4), 31).text(3, 9),
        "first": Prompt().image((1, 8, 2), 2).text(3, 4),
    }


def answers(scheduler: Scheduler, family: str, folder: Path) -> dict[str, list[int]]:
    collector = Collector()
    for rid, prompt in prompts_of(family).items():
        add(scheduler, media_request(rid, prompt, folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    assert scheduler.stats.drafts.num_steps > 0
    assert_clean(scheduler)
    return collector.tokens


@pytest.mark.parametrize(("family", "kind"), some_of(CELLS, _AT_ONCE))
def test_answers_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    model = save_seeing(family, folder)
    options = options_of(family, kind, folder, tmp_path / "draft")
    scheduler = seeing_scheduler(folder, chunked_prefill_size=24, **options)
    play = partial(answers, family=family, folder=folder)
    outputs = play(scheduler)
    for rid, prompt in prompts_of(family).items():
        assert len(outputs[rid]) == NEW_TOKENS and outputs[rid] == greedy(model, prompt, outputs[rid]), rid
    assert again_in_graphs(scheduler, play) == outputs


def _rank(rank: int, family: str, layout: str, folder: Path, options: dict[str, dict[str, Any]], out: Path) -> None:
    torch.set_num_threads(1)
    for number, (kind, for_draft) in enumerate(options.items()):
        chosen = {"chunked_prefill_size": 24, **for_draft, **LAYOUTS[layout]}
        scheduler = seeing_scheduler(folder, None, rank, f"file://{out}/{number}", **chosen)
        play = partial(answers, family=family, folder=folder)
        torch.save(play(scheduler), out / f"{kind}, rank {rank}.pt")
        torch.save(again_in_graphs(scheduler, play), out / f"{kind}, rank {rank}, graphs.pt")
        parallel_state.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family in SEEING for layout in LAYOUTS if layout != "PP2" or family not in NO_STAGES],
)
def test_drafts_of_two_ranks(family: str, layout: str, tmp_path: Path) -> None:
    """Every kind of draft, the encoder's heads or its images shared out, or the model in stages. A case for each
    layout, because all three of a family take minutes where the machine is busy."""
    folder, out = tmp_path / "target", tmp_path / "out"
    out.mkdir()
    model = save_seeing(family, folder)
    options = {
        kind: options_of(family, kind, folder, tmp_path / f"draft{number}")
        for number, kind in enumerate(kind for of_family, kind in CELLS if of_family == family)
    }
    run_ranks(_rank, (family, layout, folder, options, out), 2)
    files = sorted(out.glob("*.pt"))
    assert len(files) == 4 * len(options)
    for file in files:
        outputs = torch.load(file)
        for rid, prompt in prompts_of(family).items():
            assert len(outputs[rid]) == NEW_TOKENS and outputs[rid] == greedy(model, prompt, outputs[rid]), file.stem


def a_step(embedding: torch.Tensor) -> tuple[ForwardBatch, torch.Tensor]:
    """Two prompts of 4 and 3 tokens: images are the tokens 2 and 3 of the first, and 0 and 1 of the second. Returns the
    step, and what the target embeds."""
    ids, index = torch.arange(10, 17), torch.tensor([2, 3, 4, 5])
    features = torch.randn(4, embedding.shape[1], generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, 4, 7], dtype=torch.int32)
    rows = ExtendRows(starts, starts, starts, starts, (), [4, 3], [0, 0], [4, 3])
    batch = ForwardBatch(ids, ids, (), extend=rows, embedding_rows=EmbeddingRows(index, features))
    return batch, embedding[ids].index_copy(0, index, features)


def test_a_draft_reads_the_features_of_the_tokens_that_follow() -> None:
    """Row by row what the target embeds of the next token; behind the last row of a prompt its id."""
    embedding = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    batch, of_target = a_step(embedding)
    following = torch.tensor([11, 12, 13, 20, 15, 16, 21])
    rows = following_rows(batch)
    assert rows is not None
    parts = object.__new__(DraftParts)
    parts.embedding = lambda ids: embedding[ids]  # type: ignore[assignment]
    got = parts.embedded(replace(batch, input_ids=following, embedding_rows=rows))
    want = torch.stack([*of_target[1:4], embedding[20], *of_target[5:7], embedding[21]])
    assert torch.equal(got, want)
    assert following_rows(replace(batch, embedding_rows=None)) is None


def test_a_draft_of_another_width_reads_the_placeholder() -> None:
    embedding = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    batch, _ = a_step(torch.zeros(32, 8))
    parts = object.__new__(DraftParts)
    parts.embedding = lambda ids: embedding[ids]  # type: ignore[assignment]
    assert torch.equal(parts.embedded(replace(batch, embedding_rows=following_rows(batch))), embedding[10:17])


@pytest.mark.parametrize("family", ["step3p7", "inkling_mm_model"])
def test_each_depth_reads_the_features_of_its_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row i of depth d stands for the token at its position + 1 + d: in prompts whole and in chunks, what the target
    embedded of that token, as far as it lies in the same step."""
    folder = tmp_path / "target"
    save_seeing(family, folder)
    options = options_of(family, "nextn", folder, tmp_path / "draft")
    of_target: dict[int, torch.Tensor] = {}
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    embed_target, embed_draft = CausalLM._embedded, DraftParts.embedded

    def target(self: CausalLM, batch: ForwardBatch) -> torch.Tensor:
        embedded = embed_target(self, batch)
        of_target.clear()
        of_target.update(zip(batch.positions.tolist(), embedded.clone(), strict=True))
        calls.clear()
        return embedded

    compared = [0, 0]

    def draft(self: DraftParts, batch: ForwardBatch) -> torch.Tensor:
        embedded = embed_draft(self, batch)
        if batch.extend is not None:
            depth = len(calls)
            calls.append((batch.positions, embedded))
            for position, row in zip(batch.positions.tolist(), embedded, strict=True):
                token = position + 1 + depth
                if token in of_target:
                    assert torch.equal(row, of_target[token]), (depth, position)
                    compared[depth > 0] += 1
        return embedded

    monkeypatch.setattr(CausalLM, "_embedded", target)
    monkeypatch.setattr(DraftParts, "embedded", draft)
    for chunk in (64, 24):
        scheduler = seeing_scheduler(folder, chunked_prefill_size=chunk, disable_cuda_graph=True, **options)
        prompt = prompts_of(family)["video" if chunk == 24 else "image"]
        add(scheduler, media_request("a", prompt, folder, 1))
        run_to_end(scheduler, Collector())
    assert min(compared) >= 50
