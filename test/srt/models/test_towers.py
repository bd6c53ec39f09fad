"""Encoders of images and videos against those of transformers, from checkpoints that transformers wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.groups import Group, Groups
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor import media_timing
from sglang.srt.model_loader.loader import load_checkpoint, load_tower
from sglang.srt.plan.media import describe_media
from sglang.srt.plan.memory import media_bytes
from sglang.srt.plan.model_planner import describe_served_model
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.towers.base import encoder, patch_places, pieces
from sglang.srt.towers.base.encoder import VisionEncoder
from sglang.srt.towers.base.patch_places import Grid, clips, cubic, num_patches, parts_of_clips
from sglang.srt.towers.base.pieces import Cuts, parts_of, pieces_of
from sglang.srt.towers.base.shared_encoder import SharedEncoder, split_evenly
from sglang.srt.towers.create_encoder import create_encoder
from sglang.srt.towers.inkling import encoder as inkling
from srt.managers.fake_runner import Collector, add, run_to_end

from .media_harness import (
    ALONE,
    POOLED_FRAMES,
    PUBLISHED,
    SEEING,
    Prompt,
    ReferenceEncoder,
    args_of,
    greedy,
    grid_for,
    media_request,
    patch_values,
    save_seeing,
    seeing_scheduler,
)

BATCHES: dict[str, list[Grid]] = {
    "an image": [(1, 4, 6)],
    "two sizes": [(1, 8, 2), (1, 2, 10)],
    "a video between images": [(1, 4, 4), (3, 4, 6), (1, 6, 2)],
    "one token": [(1, 2, 2)],
    "clips of a long video": [(9, 2, 4), (1, 4, 4), (4, 4, 2)],
    "several windows": [(1, 10, 14), (2, 6, 10)],
}
TOLERANCE = 1e-4
NEW_TOKENS = 16


def tower_of(folder: Path) -> VisionEncoder[Any]:
    tower = load_tower(create_plan(args_of(folder)))
    assert tower is not None
    return tower


_SAME_TOWERS = ("qwen4_exp", "qwen3_vl_moe", "glm4v_moe", "glm46v")
"""Qwen3.8-Flash-Next has the encoder of Qwen3.5, and models with experts that of the dense ones: `make test` has those
of others, and of these the answers."""
_TOWERS = [pytest.param(name, marks=[pytest.mark.thorough] * (name in _SAME_TOWERS)) for name in SEEING]
_PIECES = [
    pytest.param(name, marks=[pytest.mark.thorough] * (name in (*_SAME_TOWERS, "step3p7", "minimax_m3_vl")))
    for name in SEEING
]


@pytest.mark.parametrize("name", _TOWERS)
def test_features_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, tower = ReferenceEncoder(save_seeing(name, tmp_path)), tower_of(tmp_path)
    for batch in BATCHES.values():
        grids = [grid_for(name, grid) for grid in batch]
        count = sum(frames * rows * columns for frames, rows, columns in grids)
        pixels = torch.randn(count, patch_values(tmp_path), generator=torch.Generator().manual_seed(count))
        got, want = tower.encode(pixels, grids), reference.encode(pixels, grids)
        assert len(got) == len(want) == len(grids)
        for item, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(item, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", list(SEEING))
def test_the_start_can_time_its_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each start does, over images of the sizes that the tower takes."""
    save_seeing(name, tmp_path, {"position_embedding_size": 64} if name.startswith("gemma4") else {})
    tower = tower_of(tmp_path)
    if not isinstance(tower, VisionEncoder):
        pytest.skip("it is not cut into slices")

    def computed(launch: Callable[[], object]) -> float:
        launch()
        return 1.0

    monkeypatch.setattr(media_timing, "_milliseconds", computed)
    times = media_timing.layer_times(tower)
    assert times.least > 0 and times.patch > 0


def test_tiles_of_several_tokens(tmp_path: Path) -> None:
    """Of Llama 4, each with a token that all of its patches see, of which no other tile has one."""
    vision = {"image_size": 24}
    reference, tower = ReferenceEncoder(save_seeing("llama4", tmp_path, vision)), tower_of(tmp_path)
    for grids in ([(1, 6, 6)], [(5, 6, 6), (1, 6, 6), (3, 6, 6)]):
        pixels = torch.randn(num_patches(grids), 48, generator=torch.Generator().manual_seed(len(grids)))
        got, want = tower.encode(pixels, grids), reference.encode(pixels, grids)
        assert [len(item) for item in got] == [9 * grid[0] for grid in grids]
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("patch", "layers"), [(40, 4), (12, 3), (4, 4), (6, 7)])
def test_plans_of_inklings_layers(patch: int, layers: int, tmp_path: Path) -> None:
    """The published one; and as many layers as there are sizes between a pixel and a patch, of which some fold
    nothing."""
    vision = {"patch_size": patch, "num_hidden_layers": layers}
    reference, tower = ReferenceEncoder(save_seeing("inkling_mm_model", tmp_path, vision)), tower_of(tmp_path)
    grids = [(1, 2, 3), (1, 1, 5)]
    pixels = torch.randn(11, 6 * patch**2, generator=torch.Generator().manual_seed(layers))
    torch.testing.assert_close(
        tower.encode(pixels, grids), reference.encode(pixels, grids), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_patches_that_go_through_inklings_layers_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at once of each half, and the rest."""
    save_seeing("inkling_mm_model", tmp_path)
    tower, grids = tower_of(tmp_path), [(1, 7, 5)]
    pixels = torch.randn(35, patch_values(tmp_path), generator=torch.Generator().manual_seed(1))
    want = tower.encode(pixels, grids)
    seen = []
    folded = tower._folded
    monkeypatch.setattr(inkling, "PATCHES_AT_ONCE", 16)
    monkeypatch.setattr(tower, "_folded", lambda pixels: (seen.append(len(pixels)), folded(pixels))[1])
    torch.testing.assert_close(tower.encode(pixels, grids), want, rtol=1e-5, atol=1e-5)
    assert seen == [16, 1, 16, 2]


@pytest.mark.parametrize("name", list(SEEING))
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """From pixels to tokens, a video among images where the model takes one."""
    model = save_seeing(name, tmp_path)
    scheduler, collector = seeing_scheduler(tmp_path), Collector()
    prompt = (
        Prompt()
        .text(4, 7)
        .image((6, 4, 4), 30, pooled=POOLED_FRAMES.get(name, 1))
        .text(5, 8)
        .image((1, 4, 6), 31)
        .text(3, 9)
    )
    add(scheduler, media_request("seen", prompt, tmp_path, NEW_TOKENS))
    run_to_end(scheduler, collector)
    output = collector.tokens["seen"]
    assert len(output) == NEW_TOKENS and output == greedy(model, prompt, output)


def test_a_video_whose_positions_tell_the_time(tmp_path: Path) -> None:
    """All frames in one run of placeholders, as Qwen2.5-VL has it; the last frame is later than the frames are wide."""
    model = save_seeing("qwen2_5_vl", tmp_path)
    scheduler = seeing_scheduler(tmp_path, chunked_prefill_size=16)
    outputs = []
    for seconds in (0.9, 1.7):
        collector = Collector()
        prompt = (
            Prompt().text(4, 7).image((3, 4, 6), 30, frame_seconds=seconds).text(5, 8).image((1, 4, 6), 31).text(3, 9)
        )
        add(scheduler, media_request("seen", prompt, tmp_path, NEW_TOKENS))
        run_to_end(scheduler, collector)
        outputs.append(collector.tokens["seen"])
        assert outputs[-1] == greedy(model, prompt, outputs[-1])
    assert outputs[0] != outputs[1]


def test_experts_as_transformers_writes_them(tmp_path: Path) -> None:
    """Not transposed, as published checkpoints have them."""
    model = save_seeing("qwen3_vl_moe", tmp_path)
    PUBLISHED["qwen3_vl_moe"](tmp_path)  # once more: as they were written
    scheduler, collector = seeing_scheduler(tmp_path), Collector()
    prompt = Prompt().text(4, 7).image((1, 4, 6), 31).text(3, 9)
    add(scheduler, media_request("seen", prompt, tmp_path, NEW_TOKENS))
    run_to_end(scheduler, collector)
    assert collector.tokens["seen"] == greedy(model, prompt, collector.tokens["seen"])


def test_a_long_video_is_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_seeing("qwen3_vl", tmp_path)
    tower, grids = tower_of(tmp_path), [(1, 4, 4), (5, 2, 4), (1, 6, 4)]
    pixels = torch.randn(80, patch_values(tmp_path), generator=torch.Generator().manual_seed(1))
    want = tower.encode(pixels, grids)
    monkeypatch.setattr(pieces, "PATCHES_A_STEP", 20)
    assert [len(run) for run in parts_of_clips(clips(grids, 1), 20)] == [1, 2, 2, 1, 1]
    assert list(parts_of_clips(clips([(9, 2, 2), (1, 2, 2)], 4), 20)) == [
        [(4, 2, 2)],
        [(4, 2, 2), (1, 2, 2)],
        [(1, 2, 2)],
    ]
    in_parts = tower.encode(pixels, grids)
    for got, wanted in zip(in_parts, want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert all(item.untyped_storage().nbytes() == item.nbytes for item in in_parts), "one may go without the others"


def test_parts_of_many_clips_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = patch_places.num_patches
    monkeypatch.setattr(patch_places, "num_patches", lambda grids: counted.append(len(grids)) or count(grids))
    assert sum(map(len, parts_of_clips([(1, 2, 2)] * 1000, 400))) == 1000
    assert sum(counted) <= 1000


def row_by_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, *rest: Any, **options: Any) -> None:
    """Attention whose rows have the same bits in every call, as those of the Triton kernel have."""
    (starts,), (index, count) = rest, options["share"]
    for row in range(len(q) * index // count, len(q) * (index + 1) // count):
        last = int((starts > row).nonzero()[0])
        seen = slice(int(starts[last - 1]), int(starts[last]))
        scores = torch.einsum("hd,khd->hk", q[row], k[seen]) * (options["scale"] or q.shape[2] ** -0.5)
        o[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])


@pytest.mark.parametrize("name", _PIECES)
def test_an_encoder_that_stops_behind_every_piece(name: str, tmp_path: Path) -> None:
    """It has the pieces that are counted beforehand, and the bits of one that does not, however attention is cut."""
    save_seeing(name, tmp_path)
    tower = tower_of(tmp_path)
    tower.attention = row_by_row
    for batch in ("two sizes", "clips of a long video"):
        # Products of very few rows have other bits on a CPU.
        grids = [grid if name in ALONE else grid_for(name, grid) for grid in BATCHES[batch]]
        pixels = torch.randn(num_patches(grids), patch_values(tmp_path), generator=torch.Generator().manual_seed(1))
        want = tower.encode(pixels, grids)
        for cuts in (Cuts(), Cuts(3), Cuts(2, 3)):
            counted = sum(len(list(pieces_of(tower.tower, part, cuts))) for part in parts_of(tower.tower, grids))
            encoding = tower.encoding(tower.sent(pixels, grids), grids, cuts)
            with torch.inference_mode():
                for _ in range(counted):
                    next(encoding)
                with pytest.raises(StopIteration) as end:
                    next(encoding)
            got = end.value.value
            assert len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("grid", [(1, 7, 3), (1, 8, 8), (1, 2, 11)])
def test_cubic_places_are_those_of_torch(grid: Grid) -> None:
    table = torch.randn(8, 8, 5, generator=torch.Generator().manual_seed(2))
    index, weights = map(torch.from_numpy, cubic([grid], 1, 8))
    got = (table.flatten(0, 1)[index] * weights[:, :, None]).sum(1)
    channels_first = table.permute(2, 0, 1)[None]
    want = torch.nn.functional.interpolate(channels_first, size=grid[1:], mode="bicubic", align_corners=False)
    torch.testing.assert_close(got, want[0].flatten(1).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ([6], [[6], []]),
        ([4, 4], [[4], [4]]),
        ([2, 2, 8], [[2, 2], [8]]),
        ([8, 2, 2], [[8], [2, 2]]),
        ([1, 1, 1, 1, 1], [[1, 1, 1], [1, 1]]),
    ],
)
def test_ranks_share_out_frames(sizes: list[int], want: list[list[int]]) -> None:
    assert [sizes[share] for share in split_evenly(sizes, len(want))] == want


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_k25", "gemma4"])
def test_an_encoder_that_ranks_share(name: str, tmp_path: Path) -> None:
    """The ranks one after the other: each gives the rows of its frames, and zeros beside them."""
    save_seeing(name, tmp_path)
    tower, grids = tower_of(tmp_path), [(1, 4, 4), (1, 2, 4), (1, 6, 4), (1, 2, 2)]
    pixels = torch.randn(52, patch_values(tmp_path), generator=torch.Generator().manual_seed(1))
    parts: list[torch.Tensor] = []

    class Recorded(Group):
        def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
            parts.append(x)
            return torch.cat(parts if len(parts) == self.size else [x] * self.size)

    for rank in range(3):
        got = SharedEncoder(tower, Recorded(rank, 3)).encode(pixels, grids)
    assert all(torch.count_nonzero(part.abs().sum(1)) < 13 for part in parts), "nobody computes all"
    for mine, wanted in zip(got, tower.encode(pixels, grids), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


class Threads(Group):
    """Ranks that are threads of this process."""

    barrier = threading.Barrier(2)
    given: ClassVar[dict[int, torch.Tensor]] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.given[self.rank] = x
        self.barrier.wait(300)
        total = self.given[0] + self.given[1]
        self.barrier.wait(300)
        return total


def rank_tower(folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> VisionEncoder[Any]:
    plan = create_plan(args_of(folder))
    assert plan.description.media is not None
    monkeypatch.setattr(encoder, "groups", lambda: Groups(tp=Threads(rank, 2)))
    with torch.inference_mode():
        tower = create_encoder(plan, plan.description.media.tower.shared_by(2))
        load_checkpoint(tower, str(folder))
    return tower


@pytest.mark.parametrize("name", [param for param in _TOWERS if param.values[0] not in ALONE])
def test_an_encoder_whose_heads_and_widths_ranks_share(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of published layouts, for every batch: each rank has the features of one that has all."""
    save_seeing(name, tmp_path)
    alone, ranks = tower_of(tmp_path), [rank_tower(tmp_path, rank, monkeypatch) for rank in range(2)]
    sizes = [sum(param.tensor.numel() for param in tower.params.values()) for tower in (alone, *ranks)]
    assert sizes[1] == sizes[2] == ranks[0].tower.num_weights() < 0.75 * sizes[0]
    for batch in BATCHES.values():
        grids = [grid_for(name, grid) for grid in batch]
        pixels = torch.randn(num_patches(grids), patch_values(tmp_path), generator=torch.Generator().manual_seed(5))
        with ThreadPoolExecutor(2) as threads:
            got = list(threads.map(lambda tower, args=(pixels, grids): tower.encode(*args), ranks))
        for items in got:
            torch.testing.assert_close(items, alone.encode(pixels, grids), rtol=TOLERANCE, atol=TOLERANCE)


def test_an_encoder_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """Each has all of it: where the number does not divide heads, with stages, with attention groups, which encode the
    images of requests of their own, and where the ranks share out images."""
    save_seeing("qwen3_vl", tmp_path)
    media = create_plan(args_of(tmp_path)).description.media
    assert media is not None
    assert media.tower.shared_by(3) is media.tower and media.tower.shared_by(2).rank_heads == 1
    assert media.tower.shared_by(1).num_weights() == media.tower.num_weights()

    def ranks_of(**options: Any) -> int:
        args = args_of(tmp_path, **options)
        described = describe_served_model(args, ModelConfig.from_server_args(args)).media
        assert described is not None
        return described.tower.ranks

    assert ranks_of(tp_size=2) == 2
    assert ranks_of(tp_size=2, pp_size=2) == ranks_of(tp_size=2, mm_enable_dp_encoder=True) == 1
    assert ranks_of(tp_size=2, attn_dp_size=2) == 1


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def misshapen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def doubled(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name.replace("blocks.0", "blocks.9")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "says"),
    [(without, "lacks weights of the model: "), (misshapen, "has shape"), (doubled, "weights that the model does not")],
)
def test_other_tensors_are_named(
    change: Callable[[dict[str, torch.Tensor], str], None], says: str, tmp_path: Path
) -> None:
    save_seeing("qwen3_vl", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.visual.blocks.0.attn.qkv.weight"
    tensors = safetensors.torch.load_file(file)
    change(tensors, name)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(UserError, match=f"{says}.*|.*model.visual.blocks"):
        tower_of(tmp_path)


STEP_VISION = {"width": 32, "layers": 2, "heads": 2}
LLAMA4_VISION = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 40)
LLAMA4_VISION |= {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA4_VISION |= {"image_size": 64}
MUSE_VISION = {"hidden_size": 1536, "num_attention_heads": 16, "num_hidden_layers": 3}
INKLING_VISION = {"n_layers": 4}
M3_VISION = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("kind", "vision", "message"),
    [
        ("step3p7", STEP_VISION | {"use_cls_token": True}, "use_cls_token = True is not supported"),
        ("step3p7", STEP_VISION | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("step3p7", {"width": 32, "heads": 2}, "the key 'layers' is missing"),
        ("minimax_m3_vl", M3_VISION | {"rope_mode": "2d"}, "rope_mode = '2d' is not supported"),
        ("minimax_m3_vl", M3_VISION | {"hidden_size": 10}, "does not divide into 2 heads of pairs"),
        ("llama4", LLAMA4_VISION | {"image_size": 48}, "makes no squares of 3 x 3 patches"),
        ("llama4", LLAMA4_VISION | {"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio 0.4 makes no squares"),
        ("llama4", LLAMA4_VISION | {"intermediate_size": 64}, "intermediate_size is not 4 times the 32 of a patch"),
        ("llama4", LLAMA4_VISION | {"vision_output_dim": 41}, "vision_output_dim are .40, 40, 41.; only equal ones"),
        ("llama4", LLAMA4_VISION | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("muse_glimmer", MUSE_VISION | {"hidden_size": 64}, "out_hidden_size is not 4 times the 64 of a patch"),
        ("muse_glimmer", MUSE_VISION | {"pos_emb_width": 16}, "the learned positions are not a square"),
        ("muse_glimmer", MUSE_VISION | {"layer_types": ["full_attention"]}, "layer_types must be 3 of full_attention"),
        ("muse_glimmer", MUSE_VISION | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        (
            "inkling_mm_model",
            INKLING_VISION | {"vision_encoder_type": "vit"},
            "vision_encoder_type = 'vit' is not supp",
        ),
        ("inkling_mm_model", {"patch_size": 40}, "the key 'n_layers' is missing"),
        ("inkling_mm_model", INKLING_VISION | {"use_vision_norm": False}, "use_vision_norm = False is not supported"),
        ("inkling_mm_model", INKLING_VISION | {"temporal_patch_size": 4}, "patches of 4 frames with 3 colours are not"),
        (
            "inkling_mm_model",
            INKLING_VISION | {"n_channels": 1},
            "patches of 2 frames with 1 colours are not supported",
        ),
        ("qwen4_exp", {"hidden_size": 32, "num_heads": 2} | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
    ],
)
def test_encoders_that_are_refused(kind: str, vision: dict[str, Any], message: str) -> None:
    sizes = {"depth": 2, "patch_size": 16, "out_hidden_size": 64}
    config = {"model_type": kind, "text_config": {"hidden_size": 64}, "vision_config": sizes | vision}
    with pytest.raises(UserError, match=message):
        describe_media(config)


def test_the_weights_are_in_the_memory_plan(tmp_path: Path) -> None:
    save_seeing("qwen3_vl", tmp_path)
    plan = create_plan(args_of(tmp_path))
    alone = create_plan(args_of(tmp_path, language_model_only=True))
    tower = tower_of(tmp_path)
    size = sum(param.tensor.nbytes for param in tower.params.values())
    assert plan.memory.weights - alone.memory.weights == size > 0
    assert load_tower(alone) is None


def test_images_that_attend_once_more_are_in_the_memory_plan(tmp_path: Path) -> None:
    save_seeing("gemma4", tmp_path)
    model = create_plan(args_of(tmp_path)).description
    assert model.media is not None
    causal = replace(model, media=replace(model.media, both_ways=False))
    more, less = (media_bytes(described, "bfloat16", 100, ONE_RANK) for described in (model, causal))
    assert more - less == 100 * (4 + 2) * (32 + 32) * 2, "queries, keys, values and outputs of 4 and 2 heads"
