"""dots3-note with images and videos: the model as transformers writes it whole, its encoder, in pieces, on ranks and in
main memory, answers after pictures, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from rank_processes import run_ranks

from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor import media_timing
from sglang.srt.model_loader.loader import load_tower
from sglang.srt.plan.host_tables import with_encoder
from sglang.srt.plan.media import describe_media
from sglang.srt.towers.base.patch_places import Grid, num_patches
from sglang.srt.towers.base.pieces import Cuts, pieces_of
from sglang.srt.towers.dots3_note.processor import PROCESSOR
from sglang.srt.towers.dots3_note.spec import Dots3Tower
from sglang.srt.towers.pictures.processor_files import read_processor_files
from srt.managers.fake_runner import Collector, add, run_to_end

from .dots3_reference import CONFIG, Dots3, weights
from .harness import TinyRunner, plan_for
from .ling3_reference import save
from .media_harness import IMAGE, VIDEO, Prompt, args_of, media_request, seeing_scheduler
from .test_ling3 import CLOSE, TOKENS, steps
from .test_towers import BATCHES, TOLERANCE, tower_of

VISION: dict[str, Any] = {
    "embed_dim": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "capacity_factor": 2,
    "router_scale": 1.5,
    "pyramid_num_routed": [-1, 4, 3],
    "adapter_in_dim": 32,
    "adapter_out_dim": CONFIG["hidden_size"],
}
SEEING = CONFIG | {"vision_config": VISION, "image_token_id": IMAGE, "video_token_id": VIDEO}
HAS_CLASS = Version(transformers.__version__) >= Version("5.24")


def encoder_weights() -> dict[str, torch.Tensor]:
    """By the names of published checkpoints."""
    media, generator = describe_media(SEEING), torch.Generator().manual_seed(3)
    assert media is not None
    tensors = {}
    for name, shape in media.tower.shapes():
        tensors[name] = 0.3 * torch.randn(shape, generator=generator) + ("norm" in name or "ln_q.weight" in name)
    patches = tensors["vision_encoder.patch_embed.proj.weight"]
    tensors["vision_encoder.patch_embed.proj.weight"] = patches.view(-1, 3, 4, 4)
    return tensors


def whole_class() -> Any:
    """Returns the class of the whole model with a small config; None where transformers is older."""
    config_class = getattr(transformers, "Dots3NoteConfig", None)
    assert (config_class is not None) == HAS_CLASS
    if config_class is None:
        return None
    keys = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "torch_dtype")}
    sound = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sound |= {"downsample_hidden_size": 8, "feature_size": 16, "adapter_input_size": 16, "adapter_out_dim": 64}
    config = config_class(
        text_config=transformers.Dots3NoteTextConfig(**keys, bos_token_id=1).to_dict(),
        vision_config=VISION,
        audio_config=sound,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=250,
    )
    return transformers.Dots3NoteForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


def pixels_of(grids: list[Grid]) -> torch.Tensor:
    return torch.randn(num_patches(grids), 48, generator=torch.Generator().manual_seed(num_patches(grids)))


def test_the_whole_model_as_transformers_writes_it(tmp_path: Path) -> None:
    """Names, keys, the text's logits and the encoder's features."""
    if (model := whole_class()) is None:
        return
    generator = torch.Generator().manual_seed(4)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in name:
            noise = 0.2 * torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(noise + ("norm" in name and name.endswith("weight")))
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(steps(TinyRunner(plan_for(tmp_path))), want, **CLOSE)
    tower = tower_of(tmp_path)
    for grids in BATCHES.values():
        with torch.inference_mode():
            features = model.model.get_image_features(pixels_of(grids), torch.tensor(grids)).pooler_output
        for got, wanted in zip(tower.encode(pixels_of(grids), grids), features, strict=True):
            torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_both_forms_of_its_config_are_one_encoder(tmp_path: Path) -> None:
    if (model := whole_class()) is None:
        return
    written, published = describe_media(model.config.to_dict()), describe_media(SEEING)
    assert written is not None and published is not None
    assert isinstance(written.tower, Dots3Tower) and written.tower == published.tower


def test_an_encoder_in_pieces_and_in_main_memory(tmp_path: Path) -> None:
    save(tmp_path, SEEING, weights() | encoder_weights())
    tower = tower_of(tmp_path)
    grids: list[Grid] = [(1, 8, 2), (3, 2, 10)]
    want = tower.encode(pixels_of(grids), grids)
    for cuts in (Cuts(), Cuts(queries=2, rows=3)):
        encoding, made, count = tower.encoding(tower.sent(pixels_of(grids), grids), grids, cuts), None, 0
        with torch.inference_mode():
            while made is None:
                try:
                    next(encoding)
                    count += 1
                except StopIteration as end:
                    made = end.value
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)
        assert count == len(list(pieces_of(tower.tower, grids, cuts)))
    plan = create_plan(args_of(tmp_path))
    streamed = load_tower(replace(plan, description=with_encoder(plan.description)))
    assert streamed is not None and streamed.streamed is not None
    torch.testing.assert_close(streamed.encode(pixels_of(grids), grids), want, rtol=1e-5, atol=1e-5)


def test_ranks_divide_heads_and_experts(tmp_path: Path) -> None:
    save(tmp_path, SEEING, weights() | encoder_weights())
    grids: list[Grid] = [(1, 4, 6), (2, 2, 4)]
    run_ranks(_rank, (tmp_path, grids), 2)
    want = tower_of(tmp_path).encode(pixels_of(grids), grids)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), want, rtol=1e-4, atol=1e-4)


def _rank(rank: int, folder: Path, grids: list[Grid]) -> None:
    torch.set_num_threads(1)
    tower = load_tower(create_plan(args_of(folder, tp_size=2), rank, f"file://{folder}/rendezvous"))
    assert tower is not None and tower.tower.ranks == 2
    assert tower.params["vision_encoder.blocks.1.mlp.experts.2.fc2.weight"].tensor.shape == (32, 12)
    torch.save(tower.encode(pixels_of(grids), grids), folder / f"{rank}.pt")


def test_answers_of_a_model_that_sees(tmp_path: Path) -> None:
    """The reference of the text, with features in place of placeholders' embeddings."""
    tensors = weights()
    save(tmp_path, SEEING, tensors | encoder_weights())
    scheduler, collector = seeing_scheduler(tmp_path, chunked_prefill_size=16), Collector()
    prompt = Prompt().text(4, 7).image((3, 4, 4), 30).text(5, 8).image((1, 4, 6), 31).text(3, 9)
    add(scheduler, media_request("seen", prompt, tmp_path, 8))
    run_to_end(scheduler, collector)
    output, tower = collector.tokens["seen"], tower_of(tmp_path)
    ids = [*prompt.ids, *output]
    # A vocabulary that has every place of the prompt as a word of its own.
    rows = tensors["model.embed_tokens.weight"][ids].clone()
    for image, runs in prompt.spans:
        (features,) = tower.encode(image.patches("dots3_note")[:, :48], [image.grid])
        rows[torch.cat([torch.arange(*run) for run in runs])] = features
    placed = tensors | {"model.embed_tokens.weight": rows}
    logits = Dots3(placed, CONFIG | {"vocab_size": len(ids)}).logits(list(range(len(ids))))
    assert len(output) == 8 and output == logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("architecture", ["Dot3NoteForCausalLM", "Dots3NoteForConditionalGeneration"])
def test_its_other_names(architecture: str, tmp_path: Path) -> None:
    plan = plan_for(save(tmp_path, CONFIG | {"architectures": [architecture]}, weights()))
    torch.testing.assert_close(steps(TinyRunner(plan)), Dots3(weights(), CONFIG).logits(TOKENS), **CLOSE)


def test_patches_have_one_frame(tmp_path: Path) -> None:
    """In both forms of the file: the published one has a section."""
    keys = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 50176, "temporal_patch_size": 1}
    keys |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    picture = Image.new("RGB", (600, 450), "white")
    for written in (keys, {"vision_config": keys}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
        files = read_processor_files(tmp_path, "dots3_note", "{}", SEEING)
        patches = PROCESSOR.views(files.image, "float32")(picture).patches[0]
        assert patches.grid == (1, 12, 18) and np.all(patches.pixels == 2.0)
    assert files.image["temporal_patch_size"] == files.video["temporal_patch_size"] == 1
    assert PROCESSOR.video is not None and PROCESSOR.video.written([0.0, 1.0], 6) == [12]


@pytest.mark.thorough
def test_the_start_can_time_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each start does, over images of the sizes that the tower takes."""
    save(tmp_path, SEEING, weights() | encoder_weights())
    monkeypatch.setattr(media_timing, "_milliseconds", lambda launch: (launch(), 1.0)[1])
    times = media_timing.layer_times(tower_of(tmp_path))
    assert times.least > 0 and times.patch > 0


def test_a_file_without_limits_or_colours(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14, "merge_size": 2}')
    with pytest.raises(UserError, match="needs min_pixels and max_pixels"):
        read_processor_files(tmp_path, "dots3_note", "{}", SEEING)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_qk_norm": False}, "use_qk_norm = False is not supported"),
        ({"use_bias": True}, "use_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"router_scoring_func": "softmax"}, "router_scoring_func = 'softmax' is not supported"),
        ({"adapter_type": "pixel_shuffle_mlp"}, "adapter_type = 'pixel_shuffle_mlp' is not supported"),
        ({"temporal_patch_size": 2}, "temporal_patch_size = 2 is not supported; it must be 1"),
        ({"adapter_merge_size": 1}, "adapter_merge_size = 1 is not supported; it must be 2"),
        ({"adapter_out_dim": 32}, "adapter_out_dim = 32 is not supported; it must be 64"),
        ({"pyramid_num_routed": [4]}, "pyramid_num_routed must be 3 numbers of experts"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_media(SEEING | {"vision_config": VISION | keys})
