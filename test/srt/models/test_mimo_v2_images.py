"""MiMo-V2.6 with images and videos: its encoder beside a plain reference, on ranks and in pieces, answers after
pictures, how these are prepared, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor import media_timing
from sglang.srt.model_loader.loader import load_tower
from sglang.srt.plan.media import describe_media
from sglang.srt.towers.base.patch_places import Grid, num_patches
from sglang.srt.towers.base.pieces import Cuts, pieces_of
from sglang.srt.towers.mimo_v2.processor import PROCESSOR
from sglang.srt.towers.pictures.processor_files import read_processor_files
from sglang.srt.towers.pictures.video_processor import VideoProcessor
from srt.managers.fake_runner import Collector, add, run_to_end

from .media_harness import Prompt, args_of, media_request, seeing_scheduler
from .mimo_v2_images import KEYS, VISION, save_mimo_seeing, seen
from .test_towers import BATCHES, TOLERANCE, tower_of

NEW_TOKENS = 8


def pixels_of(grids: list[Grid]) -> torch.Tensor:
    return torch.randn(num_patches(grids), 96, generator=torch.Generator().manual_seed(num_patches(grids)))


def wanted(tensors: dict[str, torch.Tensor], grids: list[Grid], without: str = "") -> list[torch.Tensor]:
    parts = pixels_of(grids).split([num_patches([grid]) for grid in grids])
    return [seen(tensors, VISION, part, grid, without) for part, grid in zip(parts, grids, strict=True)]


@pytest.mark.parametrize("cuts", [Cuts(), Cuts(queries=2, rows=3)])
def test_features_are_those_of_the_reference(cuts: Cuts, tmp_path: Path) -> None:
    _, tensors = save_mimo_seeing(tmp_path)
    tower = tower_of(tmp_path)
    for grids in BATCHES.values():
        made, count = None, 0
        encoding = tower.encoding(tower.sent(pixels_of(grids), grids), grids, cuts)
        with torch.inference_mode():
            while made is None:
                try:
                    next(encoding)
                    count += 1
                except StopIteration as end:
                    made = end.value
        torch.testing.assert_close(made, wanted(tensors, grids), rtol=TOLERANCE, atol=TOLERANCE)
        assert count == len(list(pieces_of(tower.tower, grids, cuts)))


@pytest.mark.parametrize("mechanism", ["columns", "sinks", "windows"])
def test_each_mechanism_changes_what_comes_out(mechanism: str, tmp_path: Path) -> None:
    """Otherwise the test above would say nothing about it."""
    _, tensors = save_mimo_seeing(tmp_path)
    grids: list[Grid] = [(1, 4, 6)]
    assert (wanted(tensors, grids)[0] - wanted(tensors, grids, mechanism)[0]).abs().max() > 0.01


def test_ranks_divide_its_heads(tmp_path: Path) -> None:
    _, tensors = save_mimo_seeing(tmp_path)
    grids: list[Grid] = [(1, 4, 6), (2, 2, 4)]
    run_ranks(_rank, (tmp_path, grids), 2)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), wanted(tensors, grids), rtol=1e-4, atol=1e-4)


def _rank(rank: int, folder: Path, grids: list[Grid]) -> None:
    torch.set_num_threads(1)
    tower = load_tower(create_plan(args_of(folder, tp_size=2), rank, f"file://{folder}/rendezvous"))
    assert tower is not None and tower.tower.ranks == 2
    assert tower.params["model.visual.blocks.0.attn.qkv.weight"].tensor.shape == (64, 32)
    torch.save(tower.encode(pixels_of(grids), grids), folder / f"{rank}.pt")
    parallel_state.shutdown()


def test_ranks_that_do_not_divide_it_each_have_all_of_it() -> None:
    media = describe_media(KEYS | {"hidden_size": 64})
    assert media is not None and media.tower.shared_by(4) is media.tower, "two heads of keys"
    assert media.tower.shared_by(2).ranks == 2 and media.tower.shared_by(3).ranks == 1


def test_answers_of_a_model_that_sees(tmp_path: Path) -> None:
    """The text model of transformers, with the reference's features in place of placeholders."""
    model, tensors = save_mimo_seeing(tmp_path)
    scheduler, collector = seeing_scheduler(tmp_path, chunked_prefill_size=16), Collector()
    prompt = Prompt().text(4, 7).image((3, 4, 4), 30).text(5, 8).image((1, 4, 6), 31).text(3, 9)
    add(scheduler, media_request("seen", prompt, tmp_path, NEW_TOKENS))
    run_to_end(scheduler, collector)
    output = collector.tokens["seen"]
    ids = torch.tensor([*prompt.ids, *output])
    rows = model.get_input_embeddings()(ids).detach().clone()
    for image, runs in prompt.spans:
        features = seen(tensors, VISION, image.patches("mimo_v2")[:, :96], image.grid)
        rows[torch.cat([torch.arange(*run) for run in runs])] = features
    with torch.no_grad():
        logits = model(inputs_embeds=rows[None]).logits[0]
    assert len(output) == NEW_TOKENS
    assert output == logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()


class Movie:
    """Ten seconds of grey frames of 64 x 96 pixels, four a second."""

    num_frames, fps, size, is_sampled = 40, 4.0, (96, 64), False

    def frames(self, indices: list[int]) -> Any:
        return (Image.fromarray(np.full((64, 96, 3), index, np.uint8)) for index in indices)


def test_pictures_and_videos_are_prepared_as_its_config_says(tmp_path: Path) -> None:
    """With a file of settings, and without: its colours do not count."""
    limits = {"image_min_pixels": 8192, "image_max_pixels": 65536, "fps": 1.0, "max_frames": 3600, "min_frames": None}
    config = KEYS | {"processor_config": limits}
    files = [read_processor_files(tmp_path, "mimo_v2", "{}", config)]
    written = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
    written |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    written |= {"temporal_patch_size": 2, "min_pixels": 8192, "max_pixels": 65536}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    files.append(read_processor_files(tmp_path, "mimo_v2", "{}", config))
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (480, 640, 3), np.uint8))
    views = [PROCESSOR.views(settings.image, "float32")(picture) for settings in files]
    assert views[0].patches[0].grid == (1, 12, 18) and views[0].parts == [54]
    assert np.array_equal(views[0].patches[0].pixels, views[1].patches[0].pixels)
    white = PROCESSOR.views(files[1].image, "float32")(Image.new("RGB", (64, 64), "white")).patches[0].pixels
    assert np.allclose(np.unique(white), [2.2489, 2.4286, 2.64], atol=1e-4)
    assert PROCESSOR.video is not None
    for settings in files:
        video = VideoProcessor(PROCESSOR.video, settings.video)(Movie())  # type: ignore[arg-type]
        assert video.patches.grid == (5, 6, 8)
        runs = [(f"00:{2 * n:02d}<|vision_start|>", 12, "<|vision_end|>") for n in range(5)]
        parts = [part for run in runs for part in run]
        parts[0], parts[-1] = f"<|mimo_video_start|>{parts[0]}", f"{parts[-1]}<|mimo_video_end|>"
        assert video.parts == parts


@pytest.mark.thorough
def test_the_start_can_time_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each start does, over images of the sizes that the tower takes."""
    save_mimo_seeing(tmp_path)
    monkeypatch.setattr(media_timing, "_milliseconds", lambda launch: (launch(), 1.0)[1])
    times = media_timing.layer_times(tower_of(tmp_path))
    assert times.least > 0 and times.patch > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"num_key_value_heads": 3}, "3 heads of keys do not divide 4 of queries"),
        ({"qk_channels": 18}, "a head of 18 dims do not divide"),
        ({"kv_channels": 8}, "kv_channels differs from the 16 dims"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is not 1e-06"),
        ({"out_hidden_size": 32}, "out_hidden_size 32 is not the model's hidden size"),
        ({"fullatt_block_indexes": [5]}, r"fullatt_block_indexes \[5\] must be layers of the 5"),
        ({"vit_window_attn_types": [0, 1]}, "vit_window_attn_types must be 5 of -1, 0 and 1"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_media(KEYS | {"hidden_size": 64, "vision_config": VISION | keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temporal_compression_ratio": 2}, "temporal_compression_ratio is not 1"),
        ({"rope_type": "mrope"}, "rope_type mrope is not supported"),
        ({"use_video_timestamps": False}, "use_video_timestamps false is not supported"),
        ({"num_frames": 8}, "num_frames in place of fps is not supported"),
    ],
)
def test_ways_to_prepare_pictures_that_are_not_served(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_media(KEYS | {"hidden_size": 64, "processor_config": keys})


def test_memory_of_the_published_encoder() -> None:
    """729M weights, as the publisher counts them."""
    kinds = [-1, *[0] * 4, *[1] * 4, -1, *[0] * 4, *[1] * 4, -1, *[0] * 4, *[1] * 4, -1]
    vision = {"depth": 28, "hidden_size": 1280, "intermediate_size": 4608, "num_heads": 32, "num_key_value_heads": 8}
    vision |= {"in_chans": 3, "patch_size": 16, "out_hidden_size": 4096, "use_sink": True, "hidden_act": "silu"}
    vision |= {"visual_token_window_size": 64, "fullatt_block_indexes": [0, 9, 18, 27], "vit_window_attn_types": kinds}
    media = describe_media(KEYS | {"hidden_size": 4096, "vision_config": vision})
    assert media is not None
    assert round(media.tower.num_weights() / 1e6) == 729
