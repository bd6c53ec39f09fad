"""DeepSeek-V4's vision edition: the encoder, spans that see themselves both ways and that no chunk cuts, experts of
images' tokens, cached prefixes, drafts, ranks and stages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

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
from sglang.srt.towers.deepseek_v4.spec import PairedRowsTower
from srt.managers.fake_runner import Collector, add, assert_clean, run_to_end
from srt.sampling.packed_logprobs import unpacked

from .media_harness import again_in_graphs, args_of, seeing_scheduler
from .v4_images import FLAT, V4Seeing, arranged, ids_of, request_of, save_v4_seeing
from .v41_images import IMAGE, Picture, texts

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published" / "DeepSeek-V4-Flash-Vision-Exp"
CLOSE = {"rtol": 0.0, "atol": 1e-3}
NEW_TOKENS, PAGE = 8, 8
DRAFT = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 4}
Prompt = list[int | Picture]
PROMPTS: dict[str, Prompt] = {
    "between": [*texts(5, 1), Picture(5, 7, 1), *texts(6, 2)],
    "first": [Picture(8, 8, 2), *texts(4, 3)],
    "two": [*texts(3, 4), Picture(2, 4, 3), Picture(7, 2, 4), *texts(2, 5), Picture(1, 1, 5), *texts(3, 6)],
    "text": [*texts(9, 7)],
}


@dataclass
class Small:
    folder: Path
    reference: V4Seeing

    def scheduler(self, **options: Any) -> Any:
        return seeing_scheduler(self.folder, **{"chunked_prefill_size": 64, **options})

    def check(self, scheduler: Scheduler, prompts: dict[str, Prompt] = PROMPTS) -> dict[str, list[int]]:
        outputs = answers(scheduler, self.folder, prompts)
        for rid, output in outputs.items():
            assert len(output) == NEW_TOKENS and output == self.reference.greedy(prompts[rid], output), rid
        return outputs


def answers(scheduler: Any, folder: Path, prompts: dict[str, Prompt] = PROMPTS) -> dict[str, list[int]]:
    collector = Collector()
    for rid, prompt in prompts.items():
        add(scheduler, request_of(rid, prompt, folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    if isinstance(scheduler, Scheduler):
        assert_clean(scheduler)
    return collector.tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("v4")
    return Small(folder, save_v4_seeing(folder))


def test_features_are_those_of_the_reference(small: Small) -> None:
    """Of even and odd rows, and sides that are no whole squares; what may come before the first mark included."""
    tower = load_tower(create_plan(args_of(small.folder)))
    assert tower is not None
    pictures = [Picture(5, 7, 1), Picture(3, 3, 2), Picture(8, 2, 3), Picture(1, 1, 4), Picture(14, 4, 5)]
    grids = [(1, one.rows, one.columns) for one in pictures]
    made = tower.encode(torch.cat([one.pixels for one in pictures]), grids)
    for one, grid, rows in zip(pictures, grids, made, strict=True):
        features = small.reference.features(one)
        want = torch.stack([features[token] for token in ["image_pad"] * 3 + arranged(one)])
        torch.testing.assert_close(rows, want, rtol=1e-4, atol=1e-4)
        assert len(rows) == tower.tower.num_tokens(grid) and (len(rows) - 5) % 4 == 0


def prompt_logprobs(scheduler: Scheduler, small: Small, prompt: Prompt) -> torch.Tensor:
    """Of all tokens but the first."""
    msg = request_of("a", prompt, small.folder, 1)
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
    "leads", [(3, 6), pytest.param((0, 1, 2, 4, 5, 7, 8), marks=pytest.mark.thorough)], ids=["some", "the others"]
)
def test_logits_of_prompts_in_chunks(leads: tuple[int, ...], small: Small) -> None:
    """Texts of different lengths before an image, which then has each number of tokens before its first mark, and which
    chunks would cut at every place."""
    scheduler = small.scheduler(page_size=PAGE)
    for lead in leads:
        prompt: Prompt = [*texts(lead, 1), Picture(8, 7, 1), *texts(5, 2), Picture(2, 5, 2), *texts(3, 3)]
        ids = ids_of(prompt)
        want = small.reference.logits(prompt).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        for chunk in (6 * PAGE, 64):
            scheduler.choice.chunk = chunk
            torch.testing.assert_close(prompt_logprobs(scheduler, small, prompt), want, **CLOSE)
            assert scheduler.flush_cache()


@pytest.mark.parametrize("broken", ["sight", "bias", "table"])
def test_what_tells_images_from_text_is_seen(broken: str, small: Small) -> None:
    prompt = PROMPTS["first"]
    want, other = small.reference.logits(prompt), small.reference.logits(prompt, broken=broken)
    assert (other - want).abs().max() > 50 * CLOSE["atol"]


def test_answers_are_those_of_the_reference(small: Small) -> None:
    """Launched kernel by kernel, and with graphs for the steps without images."""
    scheduler = small.scheduler()
    want = small.check(scheduler)
    assert again_in_graphs(scheduler, lambda scheduler: answers(scheduler, small.folder)) == want


@pytest.mark.parametrize("page", [PAGE, pytest.param(2 * PAGE, marks=pytest.mark.thorough)])
def test_prefixes_with_images(page: int, small: Small) -> None:
    """The same picture is part of a cached prefix, which never ends within it: no state is kept there. A picture
    elsewhere has other tokens before it."""
    begin, behind = texts(4, 8), texts(20, 9)
    scheduler = small.scheduler(page_size=page)
    first: dict[str, Prompt] = {"a": [*begin, Picture(8, 8, 1), *behind]}
    small.check(scheduler, first)
    features = scheduler.media.features
    encoded = features.num_encoded
    small.check(scheduler, first | {"b": [*begin, Picture(8, 8, 1), *texts(5, 10)]})
    small.check(scheduler, {"ends with it": [*begin, Picture(8, 8, 1), 7]})
    small.check(scheduler, {"moved": [*begin, 3, Picture(8, 8, 1), *behind]})
    assert features.num_encoded == encoded
    small.check(scheduler, {"c": [*begin, Picture(8, 8, 2), *behind]})
    assert features.num_encoded == encoded + 1


def test_an_image_at_the_end_of_a_prompt_ends_it(small: Small) -> None:
    """States are kept at the last whole page, which lies within the image: a pause there would never come."""
    scheduler = small.scheduler(page_size=PAGE)
    for lead in (1, 6):
        small.check(scheduler, {f"lead {lead}": [*texts(lead, 1), Picture(8, 8, 1)]})
        assert scheduler.flush_cache()


def test_an_image_longer_than_a_step_is_refused(small: Small) -> None:
    scheduler = small.scheduler(chunked_prefill_size=16)
    collector = Collector()
    add(scheduler, request_of("a", PROMPTS["first"], small.folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    assert "--chunked-prefill-size" in str(collector.finish["a"])


@pytest.mark.thorough  # of two ranks in every run
def test_drafts_behind_images(small: Small) -> None:
    scheduler = small.scheduler(**DRAFT)
    small.check(scheduler)
    assert scheduler.stats.drafts.num_steps > 0


def _rank(rank: int, folder: Path, options: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    scheduler = seeing_scheduler(folder, None, rank, f"file://{out}/rendezvous", chunked_prefill_size=64, **options)
    torch.save(answers(scheduler, folder), out / f"{rank}.pt")
    parallel_state.shutdown()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "groups": {"tp_size": 2, "attn_dp_size": 2},
    "tp2 with drafts": {"tp_size": 2, **DRAFT},
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
    """Neither the encoder nor the biases that only images need are there."""
    plan = create_plan(args_of(small.folder, language_model_only=True))
    assert plan.description.media is None and load_tower(plan) is None
    layers = plan.description.layers
    assert all(not isinstance(layer.ffn, MoE) or layer.ffn.router.image_token is None for layer in layers)
    model = load_model(plan)
    assert bytes_of(model) == rank_weight_bytes(rank_weights(plan.description, ONE_RANK), "float32")
    assert not any(name.endswith("bias_vl") for name in model.params)


def test_memory_counts_what_is_there(small: Small) -> None:
    plan = create_plan(args_of(small.folder))
    model, tower = load_model(plan), load_tower(plan)
    assert tower is not None
    planned = rank_weight_bytes(rank_weights(plan.description, ONE_RANK), "float32")
    assert bytes_of(model) + bytes_of(tower) == planned
    more, one = (media_bytes(plan.description, "float32", count, ONE_RANK) for count in (17, 16))
    assert more - one >= 64 * 25, "of whole images that the window's selection has"


@pytest.mark.parametrize("name", ["vision.blocks.1.attn.wqkv.bias", "image_pad"])
def test_a_tensor_of_the_encoder_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    save_v4_seeing(tmp_path)
    without(tmp_path, name)
    with pytest.raises(UserError, match=f"lacks weights of the model: {name}"):
        load_tower(create_plan(args_of(tmp_path)))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_bias_for_images_is_asked_for(layer: int, tmp_path: Path) -> None:
    save_v4_seeing(tmp_path)
    without(tmp_path, f"layers.{layer}.ffn.gate.bias_vl")
    with pytest.raises(UserError, match=rf"lacks weights of the model: layers\.{layer}\.ffn\.gate\.bias_vl"):
        load_model(create_plan(args_of(tmp_path)))
    load_model(create_plan(args_of(tmp_path, language_model_only=True)))


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def test_the_published_encoder() -> None:
    media = describe_media(json.loads((PUBLISHED / "config.json").read_text()))
    assert media is not None and (media.image_token, media.video_token, media.fill) == (129264, None, 3)
    tower = media.tower
    assert isinstance(tower, PairedRowsTower) and tower.longest_run == 384 and media.both_ways
    shapes = dict(tower.shapes())
    assert shapes["vision.blocks.31.mlp.w1.weight"] == (5632, 1024) and shapes["image_pad"] == (4096,)
    assert shapes["aligner.w1.weight"] == (4096, 9216) and len(shapes) == 32 * 8 + 11
    assert tower.num_tokens((1, 30, 45)) == 3 + 2 + 10 * 16 and tower.num_tokens((1, 27, 45)) == 3 + 2 + 10 * 16
    assert tower.num_tokens((1, 3, 3)) == 3 + 2 + 4 and tower.num_tokens((1, 6, 6)) == 3 + 2 + 6 + 2
    for ranks in (2, 4, 8):
        assert tower.shared_by(ranks).ranks == ranks


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vision_n_heads": 3}, "does not divide into 3 heads of whole quarters"),
        ({"vision_dim": None}, "'hidden_size' is missing"),
        ({"vision_max_n_token": None}, "'max_image_tokens' is missing"),
        ({"vision_min_pixels": None}, "'min_pixels' is missing"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_v4_seeing(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changed = {key: value for key, value in {**config, **keys}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=message):
        create_plan(args_of(tmp_path))


def test_an_edition_without_an_encoder_reads_text() -> None:
    config = json.loads((PUBLISHED / "config.json").read_text())
    assert FLAT.keys() <= config.keys() and IMAGE != 0
    assert describe_media(config | {"vision_n_layers": 0}) is None
    assert describe_media(config | {"model_type": "deepseek_ref"}) == describe_media(config)
