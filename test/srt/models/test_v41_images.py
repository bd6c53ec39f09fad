"""DeepSeek-V4.1 with images against a reference in plain torch: the encoder, prompts that are cut anywhere, cached
prefixes, the draft of its checkpoint, ranks and stages, and what a server of text alone leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.engram.layer import OF_IMAGE, EngramBlock
from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_loader.loader import load_model, load_tower
from sglang.srt.plan.media import describe_media
from sglang.srt.plan.memory import media_bytes
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.weights import rank_weight_bytes
from sglang.srt.towers.base.encoder import VisionEncoder
from sglang.srt.towers.base.patch_places import Grid
from sglang.srt.towers.base.pieces import Cuts, pieces_of
from srt.managers.fake_runner import Collector, add, assert_clean, run_to_end
from srt.sampling.packed_logprobs import unpacked

from .harness import TinyRunner, plan_for
from .media_harness import again_in_graphs, args_of, seeing_scheduler
from .v41_images import IMAGE, VISION, Picture, Pictured, V41Seeing, pictured, save_v41_seeing, seen, texts

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published" / "DeepSeek-V4.1-Flash"
CLOSE = {"rtol": 0.0, "atol": 1e-3}
NEW_TOKENS, PAGE = 8, 8
DRAFT = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 4}
PROMPTS = {
    "between": pictured(texts(5, 1), Picture(5, 7, 1), texts(6, 2)),
    "first": pictured(Picture(3, 3, 2), texts(4, 3)),
    "two": pictured(texts(3, 4), Picture(2, 4, 3), Picture(7, 2, 4), texts(2, 5), Picture(1, 1, 5), texts(3, 6)),
    "text": pictured(texts(9, 7)),
}


@dataclass
class Small:
    folder: Path
    reference: V41Seeing

    def scheduler(self, **options: Any) -> Any:
        return seeing_scheduler(self.folder, **{"chunked_prefill_size": 16, **options})

    def check(self, scheduler: Scheduler, prompts: dict[str, Pictured] = PROMPTS) -> dict[str, list[int]]:
        outputs = answers(scheduler, self.folder, prompts)
        for rid, output in outputs.items():
            assert len(output) == NEW_TOKENS and output == self.reference.greedy(prompts[rid], output), rid
        return outputs


def answers(scheduler: Any, folder: Path, prompts: dict[str, Pictured] = PROMPTS) -> dict[str, list[int]]:
    collector = Collector()
    for rid, prompt in prompts.items():
        add(scheduler, prompt.request(rid, folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    if isinstance(scheduler, Scheduler):
        assert_clean(scheduler)
    return collector.tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("v41")
    return Small(folder, save_v41_seeing(folder))


def tower_of(folder: Path) -> VisionEncoder[Any]:
    tower = load_tower(create_plan(args_of(folder)))
    assert tower is not None
    return tower


@pytest.mark.parametrize("cuts", [Cuts(), Cuts(queries=2, rows=3)])
def test_features_are_those_of_the_reference(cuts: Cuts, small: Small) -> None:
    """Of sides that are whole squares and that are not, alone and several together."""
    tower, w = tower_of(small.folder), small.reference.text.w
    for shapes in ([(5, 7)], [(3, 3), (6, 3)], [(2, 9), (1, 4), (7, 1)], *[[(1, 1)]] * (cuts.rows == 1)):
        pictures = [Picture(*shape, seed) for seed, shape in enumerate(shapes)]
        grids: list[Grid] = [(1, one.rows, one.columns) for one in pictures]
        pixels = torch.cat([one.pixels for one in pictures])
        want = [seen(w, VISION, one.pixels, one.rows, one.columns) for one in pictures]
        assert [tower.tower.num_tokens(grid) for grid in grids] == [len(one) for one in want]
        pieces = tower.encoding(tower.sent(pixels, grids), grids, cuts)
        count, made = 0, None
        while made is None:
            try:
                next(pieces)
                count += 1
            except StopIteration as end:
                made = end.value
        torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
        assert count == len(list(pieces_of(tower.tower, grids, cuts)))


def prompt_logprobs(scheduler: Scheduler, small: Small, prompt: Pictured) -> torch.Tensor:
    """Of all tokens but the first."""
    msg = prompt.request("a", small.folder, 1)
    msg.return_logprob, msg.logprob_start_len = True, 0
    add(scheduler, msg)
    values: list[float] = []
    while scheduler.reqs:
        scheduler.step()
        for message in scheduler.outbox:
            values += [value for value, _ in unpacked(message.logprobs[0]).input if value is not None]
        scheduler.outbox.clear()
    scheduler.sync()
    return torch.tensor(values)


@pytest.mark.parametrize(
    "leads", [(3, 6), pytest.param((0, 1, 2, 4, 5, 7), marks=pytest.mark.thorough)], ids=["some", "the others"]
)
def test_logits_of_prompts_that_are_cut(leads: Sequence[int], small: Small) -> None:
    """Chunks end with pages of 8 tokens, so texts of different lengths before an image have it cut at every place:
    where n-grams begin anew, and where experts are chosen by another bias."""
    scheduler = small.scheduler(chunked_prefill_size=64, page_size=PAGE)
    for lead in leads:
        prompt = pictured(texts(lead, 1), Picture(8, 7, 1), texts(5, 2), Picture(2, 5, 2), texts(3, 3))
        want = small.reference.logits(prompt).log_softmax(-1)[range(len(prompt.ids) - 1), prompt.ids[1:]]
        for chunk in (PAGE, 3 * PAGE, 64):
            scheduler.choice.chunk = chunk
            torch.testing.assert_close(prompt_logprobs(scheduler, small, prompt), want, **CLOSE)
            assert scheduler.flush_cache()


@pytest.mark.parametrize("broken", ["bias", "gate", "reach"])
def test_what_tells_images_from_text_is_seen(broken: str, small: Small) -> None:
    """Logits differ by more than the tolerance where the reference routes images as text, or looks up n-grams of
    them."""
    text, prompt = small.reference.text, PROMPTS["between"]
    features, want = small.reference.features(prompt), small.reference.logits(prompt)
    other = type(text)(text.c, dict(text.w), text.texts, text.image_token)
    if broken == "bias":
        other.w |= {name: text.w[name.removesuffix("_vl")] for name in text.w if name.endswith("gate.bias_vl")}
    else:
        kept, engram = text.image_token, other.engram
        begin = prompt.ids.index(IMAGE)

        def of_text(layer: int, h: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
            other.image_token = -1
            plain = engram(layer, h, tokens)
            other.image_token = kept
            added = engram(layer, h, tokens)
            rows = other.pictured(tokens) == (broken == "gate")
            rows[:begin] = False
            return torch.where(rows[:, None, None], plain, added)

        other.engram = of_text  # type: ignore[method-assign]
    assert (other.logits(prompt.ids, features) - want).abs().max() > 50 * CLOSE["atol"]


def test_answers_are_those_of_the_reference(small: Small) -> None:
    """Launched kernel by kernel, and in graphs."""
    scheduler = small.scheduler()
    want = small.check(scheduler)
    assert again_in_graphs(scheduler, lambda scheduler: answers(scheduler, small.folder)) == want


def test_prefixes_with_images(small: Small) -> None:
    """The same picture is a cached prefix, also where it ends within it; another one of its size is none."""
    begin, behind = texts(4, 8), texts(20, 9)
    scheduler = small.scheduler(page_size=PAGE)
    first = {"a": pictured(begin, Picture(7, 8, 1), behind)}
    small.check(scheduler, first)
    features = scheduler.media.features
    encoded = features.num_encoded
    small.check(scheduler, first | {"b": pictured(begin, Picture(7, 8, 1), texts(5, 10))})
    assert features.num_encoded == encoded
    small.check(scheduler, {"c": pictured(begin, Picture(7, 8, 2), behind)})
    assert features.num_encoded == encoded + 1


@pytest.mark.thorough  # of two ranks in every run
def test_drafts_behind_images(small: Small) -> None:
    scheduler = small.scheduler(**DRAFT)
    small.check(scheduler)
    assert scheduler.stats.drafts.num_steps > 0


def test_no_ngram_is_looked_up_by_an_image(small: Small) -> None:
    """Where a token is an image's, the number of its text is none, and what is added is zero."""
    model = load_model(create_plan(args_of(small.folder)))
    blocks = [block for layer in model.layers for _, block in layer.blocks if isinstance(block, EngramBlock)]
    assert len(blocks) == 2
    for block in blocks:
        assert block.texts[IMAGE] == OF_IMAGE and (block.texts == OF_IMAGE).sum() == 1


def _rank(rank: int, folder: Path, options: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    scheduler = seeing_scheduler(folder, None, rank, f"file://{out}/rendezvous", chunked_prefill_size=16, **options)
    torch.save(answers(scheduler, folder), out / f"{rank}.pt")
    parallel_state.shutdown()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2, images apart": {"tp_size": 2, "mm_enable_dp_encoder": True},
    "pp2": {"pp_size": 2},
    "groups": {"tp_size": 2, "attn_dp_size": 2},
    "tp2 with drafts": {"tp_size": 2, **DRAFT},
    "pp2 with drafts": {"pp_size": 2, **DRAFT},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "tp2 with drafts")) for name in LAYOUTS]
)
def test_two_ranks(layout: str, small: Small, tmp_path: Path) -> None:
    run_ranks(_rank, (small.folder, LAYOUTS[layout], tmp_path), 2)
    for rank in range(2):
        for rid, output in torch.load(tmp_path / f"{rank}.pt").items():
            assert output == small.reference.greedy(PROMPTS[rid], output), (rank, rid)


def bytes_of(model: Any) -> int:
    return sum(param.tensor.nbytes for param in model.params.values())


def test_text_alone(small: Small) -> None:
    """Neither the encoder nor what only images need is there, and text is what it was."""
    plan = create_plan(args_of(small.folder, language_model_only=True))
    assert plan.description.media is None and load_tower(plan) is None
    layers = plan.description.layers
    assert all(not isinstance(layer.ffn, MoE) or layer.ffn.router.image_token is None for layer in layers)
    assert all(not isinstance(layer.ngrams, Engram) or layer.ngrams.image_token is None for layer in layers)
    runner, tokens = TinyRunner(plan_for(small.folder, language_model_only=True)), texts(30, 3)
    torch.testing.assert_close(runner.extend({1: tokens})[0], small.reference.text.logits(tokens), **CLOSE)
    planned = rank_weight_bytes(rank_weights(plan.description, ONE_RANK), "float32")
    assert bytes_of(runner.model) == bytes_of(load_model(plan)) == planned
    assert not any(name.endswith("bias_vl") for name in runner.model.params)


def test_memory_counts_what_is_there(small: Small) -> None:
    plan = create_plan(args_of(small.folder))
    model, tower = load_model(plan), load_tower(plan)
    assert tower is not None
    planned = rank_weight_bytes(rank_weights(plan.description, ONE_RANK), "float32")
    assert bytes_of(model) + bytes_of(tower) == planned
    assert media_bytes(plan.description, "float32", 16, ONE_RANK) > 0


@pytest.mark.parametrize(
    "name",
    ["vision.blocks.1.attn.wqkv.bias", "vision.norm.weight", "aligner.w2.weight", "image_newline"],
)
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    save_v41_seeing(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(UserError, match=f"lacks weights of the model: {name}"):
        tower_of(tmp_path)


def test_a_bias_for_images_is_asked_for(tmp_path: Path) -> None:
    save_v41_seeing(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["layers.3.ffn.gate.bias_vl"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"lacks weights of the model: layers\.3\.ffn\.gate\.bias_vl"):
        load_model(create_plan(args_of(tmp_path)))
    load_model(create_plan(args_of(tmp_path, language_model_only=True)))


def test_the_published_encoder() -> None:
    media = describe_media(json.loads((PUBLISHED / "config.json").read_text()))
    assert media is not None and (media.image_token, media.video_token) == (129264, None)
    shapes = dict(media.tower.shapes())
    assert shapes["vision.patch_embed.proj.weight"] == (1024, 588)
    assert shapes["vision.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert shapes["vision.blocks.0.mlp.w1.weight"] == (5632, 1024)
    assert shapes["aligner.w1.weight"] == (5120, 9216) and shapes["image_end"] == (5120,)
    assert len(shapes) == 32 * 8 + 10 and media.tower.num_tokens((1, 31, 90)) == 11 * 31 + 2
    for ranks in (2, 4, 8):
        assert media.tower.shared_by(ranks).ranks == ranks
    assert media.tower.shared_by(3).ranks == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_attention_heads": 3}, "does not divide into 3 heads of whole quarters"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"downsample_ratio": 0}, "'downsample_ratio'"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_v41_seeing(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    vision = {key: value for key, value in {**config["vision_config"], **keys}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": vision}))
    with pytest.raises(UserError, match=message):
        create_plan(args_of(tmp_path))
