"""Tiny models that see: saved by transformers, served by our scheduler. Images of prompts are random patches."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import itertools
import json
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from tiny_models import made_once

from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.model_executor.media_features import MediaEncoder
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import shared_array
from sglang.srt.utils.media_item import MediaItem
from srt.managers.fake_runner import request
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.models.harness import (
    BLOCKS,
    GEMMA4,
    GEMMA4_LAYERS,
    HYBRID,
    LATENT,
    POOLED,
    POOLED_LATENT,
    ROUTED,
    SIZES,
    TINY,
    YARN,
    published_m3_text,
    randomize,
)
from srt.models.media_corrections import CORRECTIONS
from srt.models.quantized_checkpoints import join_experts, split_experts

if TYPE_CHECKING:
    import transformers

IMAGE, VIDEO, BEGIN, END = 251, 252, 253, 254
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
PATCH_VALUES = 3 * 2 * 4 * 4
MERGE = 2

GEMMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 32,
}
GLM_VISION = {"image_size": 32, "hidden_act": "silu"}
AXIAL = {"rope_type": "axial", "rope_theta": 500.0}

# name -> (config class, text config, vision config, zero-centred norms)
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "qwen3_vl": ("Qwen3VLConfig", {"rope_parameters": SECTIONS}, {"deepstack_visual_indexes": [0, 1, 2]}, False),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {"rope_parameters": SECTIONS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        {"deepstack_visual_indexes": [0, 2]},
        False,
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        HYBRID
        | {"linear_value_head_dim": 16}
        | {"rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {},
        True,
    ),
    "qwen4_exp": ("Qwen4ExpConfig", POOLED, {"rope_parameters": AXIAL}, True),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {"rope_parameters": SECTIONS | {"mrope_interleaved": False, "mrope_section": [2, 3, 3]}}
        | {"eos_token_id": 2, "head_dim": 16},
        {"hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 3},
        False,
    ),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        ROUTED
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True}
        | {"rope_parameters": GLM_ROPE, "use_qk_norm": False},
        GLM_VISION,
        False,
    ),
    "glm4v": (
        "Glm4vConfig",
        {"rope_parameters": GLM_ROPE | {"mrope_section": [2, 1, 1]}, "head_dim": 16},
        GLM_VISION,
        False,
    ),
    "glm46v": (
        "Glm46VConfig",
        ROUTED
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True}
        | {"rope_parameters": GLM_ROPE, "use_qk_norm": False, "model_type": "glm4v_moe_text"},
        GLM_VISION,
        False,
    ),
    "glm5_next": (
        "Glm5NextConfig",
        POOLED_LATENT,
        GLM_VISION | {"projection_intermediate_size": 40, "swiglu_limit": 0.5, "rope_parameters": AXIAL},
        False,
    ),
    "gemma4": (
        "Gemma4Config",
        GEMMA4 | {"layer_types": GEMMA4_LAYERS, "use_bidirectional_attention": "vision", "sliding_window": 16},
        {"standardize": True},
        False,
    ),
    "gemma4_per_layer": (
        "Gemma4Config",
        GEMMA4
        | {"attention_k_eq_v": False, "num_global_key_value_heads": None, "hidden_size_per_layer_input": 16}
        | {"layer_types": GEMMA4_LAYERS[1:3] * 2, "num_kv_shared_layers": 2, "use_bidirectional_attention": None},
        {"use_clipped_linears": True},
        False,
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN, "model_type": "deepseek_v3"},
        {"pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2, "num_hidden_layers": 2},
        False,
    ),
    "step3p7": ("Step3p7Config", TINY["step3p7"][1], {}, True),
    "minimax_m3_vl": ("MiniMaxM3VLConfig", BLOCKS, {"num_hidden_layers": 2, "hidden_size": 36}, True),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        TINY["muse_glimmer"][1],
        {"layer_types": ["window_attention", "full_attention", "window_attention"], "num_hidden_layers": 3}
        | {"pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "layer_norm_eps": 1e-3},
        True,
    ),
    "llama4": (
        "Llama4Config",
        TINY["llama4"][1],
        {"image_size": 8, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"vision_output_dim": 40, "projector_input_dim": 40, "projector_output_dim": 40},
        False,
    ),
    "inkling_mm_model": ("InklingConfig", TINY["inkling"][1] | {"unpadded_vocab_size": None}, {}, False),
}
POOLED_FRAMES = {"kimi_k25": 4}
"""So many frames of a video become the tokens of one; of others each has its own."""
SEEN_FRAMES = POOLED_FRAMES | {"minimax_m3_vl": 4}
"""So many frames of a video see one another; of others each sees itself."""
ONE_FRAME = ("dots3_note", "kimi_k25", "gemma4", "step3p7", "llama4")
"""`model_type` of those whose patches have one frame."""
PAGES = {"glm5_next": 4, "qwen4_exp": 4, "minimax_m3_vl": 4}
"""Tokens that a page holds at least, of which no chunk cuts one."""
BOTH_WAYS = ("gemma4",)
"""Those whose images see themselves both ways, and are not cut."""
IMAGES_ALONE = ("step3p7", "llama4", "inkling_mm_model")
"""`model_type` of those that take no video: what is one for others is an image of several views for them."""
SIDES = {"step3p7": 2}
"""A token of these has so many times as many patches a side."""
ALONE = ("inkling_mm_model",)
"""Those of whose patches each is a token, and sees no other."""
Grid = tuple[int, int, int]
Played = TypeVar("Played")


def model_type(folder: Path) -> str:
    """Of the model in the folder; empty if there is none."""
    config = folder / "config.json"
    return str(json.loads(config.read_text())["model_type"]) if config.exists() else ""


def patch_values(folder: Path) -> int:
    """Values of a patch of the model in the folder, the first of those that an image of a prompt has."""
    return PATCH_VALUES // 2 if model_type(folder) in ONE_FRAME else PATCH_VALUES


def grid_for(kind: str, grid: Grid) -> Grid:
    """The grid that has as many tokens for models of this `model_type` as `grid` has for most. Tiles of Llama 4 have
    one token each."""
    if kind == "llama4":
        return (math.prod(grid) // MERGE**2, MERGE, MERGE)
    if kind == "inkling_mm_model":
        return (grid[0], grid[1] // MERGE, grid[2] // MERGE)
    side = SIDES.get(kind, 1)
    return (grid[0], side * grid[1], side * grid[2])


def save_seeing(
    name: str, folder: Path, of_vision: Mapping[str, Any] | None = None, **more: Any
) -> transformers.PreTrainedModel:
    """A tiny fp32 model in which every parameter is random. of_vision, more: keys of the configs of vision and text.
    The same model is made once a run."""
    vision = of_vision or {}
    return made_once(("seeing", name, vision, more), folder, lambda made: _save_seeing(name, made, vision, more))


def _save_seeing(
    name: str, folder: Path, of_vision: Mapping[str, Any], more: dict[str, Any]
) -> transformers.PreTrainedModel:
    import transformers  # slow, and ranks do not need it

    class_name, text, vision, zero_centred = SEEING[name]
    vision = vision | of_vision
    settings = copy.deepcopy({"text_config": SIZES | text | more, "vision_config": TOWER | vision} | TOKENS)
    if name == "kimi_k25":
        settings["vision_config"] = {
            key: TOWER[key] for key in ("hidden_size", "intermediate_size", "patch_size")
        } | vision
        settings["projection_hidden_size"] = TOWER["hidden_size"]
    if name == "minimax_m3_vl":
        sizes = ("hidden_size", "intermediate_size", "patch_size", "temporal_patch_size", "spatial_merge_size")
        settings["vision_config"] = {key: TOWER[key] for key in sizes} | {"num_attention_heads": 2} | vision
        settings["projector_hidden_size"] = 40
    if name == "llama4":
        settings["vision_config"] = {key: TOWER[key] for key in ("hidden_size", "patch_size")} | vision
    if name == "inkling_mm_model":
        settings["vision_config"] = {"patch_size": 4, "num_hidden_layers": 2, "temporal_patch_size": 2} | vision
    if name == "muse_glimmer":
        sizes = ("hidden_size", "intermediate_size", "patch_size")
        settings["vision_config"] = {key: TOWER[key] for key in sizes} | vision
        settings |= {"out_hidden_size": TOWER["hidden_size"] * MERGE**2, "projector_hidden_size": 40}
    if name == "step3p7":
        settings["vision_config"] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} | vision
        settings["vision_config"] |= {"image_size": 32, "patch_size": 4, "mlp_ratio": 1.5}
    if class_name == "Gemma4Config":
        settings["vision_config"] = GEMMA_VISION | vision
        settings |= {"boi_token_id": BEGIN, "eoi_token_id": END, "audio_config": None, "audio_token_id": 255}
    config = getattr(transformers, class_name)(**settings)
    torch.manual_seed(0)
    with assignments() if name in ALONE else contextlib.nullcontext():
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model, zero_centred)
    for key, param in model.named_parameters():
        if (".visual." in key or "vision_tower" in key) and "norm" in key:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    for key, buffer in model.named_buffers():
        if "vision_tower" in key and key.endswith(("min", "max")):
            buffer.fill_(2.0 if key.endswith("max") else -2.0)
        elif "vision_tower.std_" in key:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    with torch.no_grad():
        model.get_output_embeddings().weight[IMAGE:] = 0.0  # nobody says a placeholder
    if name.startswith("glm"):
        model.model.get_placeholder_mask = _masks_by_token
    if name in CORRECTIONS:
        CORRECTIONS[name](model)
    model.save_pretrained(folder)
    if name in PUBLISHED:
        PUBLISHED[name](folder)
    return model


def least_assignment(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """costs [rows, columns], with at least as many columns. Returns the rows, and a column for each, all different,
    which cost least together."""
    rows = np.arange(len(costs))
    columns = map(np.array, itertools.permutations(range(costs.shape[1]), len(costs)))
    return rows, min(columns, key=lambda chosen: float(costs[rows, chosen].sum()))


@contextlib.contextmanager
def assignments() -> Iterator[None]:
    """transformers asks scipy for an assignment where it plans Inkling's encoder; here all are tried."""
    optimize = types.ModuleType("scipy.optimize")
    optimize.linear_sum_assignment = least_assignment  # type: ignore[attr-defined]
    stand_ins = {"scipy": types.ModuleType("scipy"), optimize.__name__: optimize}
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _masks_by_token(
    ids: torch.Tensor, inputs_embeds: torch.Tensor, image_features: Any = None, video_features: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of images and of videos. GLM's class takes both for images, and so only one of them in a prompt."""
    return (ids == IMAGE)[..., None].expand_as(inputs_embeds), (ids == VIDEO)[..., None].expand_as(inputs_embeds)


def as_published_qwen3_vl_moe(folder: Path) -> None:
    """What transformers wrote of Qwen3-VL with experts, whose matrices are transposed in published checkpoints."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    safetensors.torch.save_file(tensors, file)


def as_published_glm46v(folder: Path) -> None:
    """What transformers wrote of GLM-4.6V by its newer name, with experts one by one as in published checkpoints."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    split_experts(tensors)
    safetensors.torch.save_file(tensors, file)


def as_published_qwen4_exp(folder: Path) -> None:
    """What transformers wrote of Qwen3.8-Flash-Next, with all experts in one tensor as in published checkpoints."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    join_experts(tensors)
    safetensors.torch.save_file(tensors, file)


def as_published_qwen2_5_vl(folder: Path) -> None:
    """What transformers wrote of Qwen2.5-VL, with the names and the flat keys of published checkpoints."""
    file = folder / "model.safetensors"
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = safetensors.torch.load_file(file)
    for written, published in names.items():
        tensors = {name.replace(written, published): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key not in config}
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (folder / "config.json").write_text(json.dumps(config | text))


def as_published_kimi(folder: Path) -> None:
    """What transformers wrote of Kimi K2.5, with the names and keys of published checkpoints."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    names = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    for written, published in names.items():
        tensors = {name.removeprefix("model.").replace(written, published): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    vision = config["vision_config"]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        vision[f"vt_{key}"] = vision.pop(key)
    for key in ("pos_emb_height", "pos_emb_width", "pos_emb_time"):
        vision[f"init_{key}"] = vision.pop(key)
    (folder / "config.json").write_text(json.dumps(config))


def as_published_m3_vl(folder: Path) -> None:
    """What transformers wrote of MiniMax-M3, with the keys of published checkpoints, and with their names of what is no
    expert: transformers 5.17 turns these into those of experts."""
    file, in_blocks = folder / "model.safetensors", ".block_sparse_moe."
    tensors = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        module = name.partition(in_blocks)[2]
        if module.startswith(("fc", "gate_proj", "up_proj", "down_proj")):
            name = name.replace(in_blocks, ".mlp.")
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    sizes = {key: vision.pop(key) for key in ("spatial_merge_size", "temporal_patch_size")}
    vision |= {"rope_theta": vision.pop("rope_parameters")["rope_theta"], "position_embedding_type": "rope"}
    vision |= {"img_token_compression_config": {"image_token_compression_method": "patch_merge", **sizes}}
    vision |= {"rope_mode": "3d", "vision_segment_max_frames": SEEN_FRAMES["minimax_m3_vl"]}
    config["text_config"] = published_m3_text(config["text_config"])
    (folder / "config.json").write_text(json.dumps(config))


PUBLISHED = {
    "minimax_m3_vl": as_published_m3_vl,
    "glm46v": as_published_glm46v,
    "kimi_k25": as_published_kimi,
    "qwen2_5_vl": as_published_qwen2_5_vl,
    "qwen3_vl_moe": as_published_qwen3_vl_moe,
    "qwen4_exp": as_published_qwen4_exp,
}
"""What makes a published checkpoint of one that transformers wrote."""


@dataclass
class Image:
    """Random patches; a video if it has several frames."""

    grid: Grid
    seed: int
    frame_seconds: float = 0.0

    @property
    def kind(self) -> str:
        return "video" if self.grid[0] > 1 else "image"

    @property
    def pixels(self) -> torch.Tensor:
        return self.patches("")

    def patches(self, kind: str) -> torch.Tensor:
        """For models of this `model_type`."""
        count = math.prod(grid_for(kind, self.grid))
        return torch.randn(count, PATCH_VALUES, generator=torch.Generator().manual_seed(self.seed))


@dataclass
class Prompt:
    """Token ids with placeholders, and the images that they stand for."""

    ids: list[int] = field(default_factory=list)
    spans: list[tuple[Image, list[tuple[int, int]]]] = field(default_factory=list)

    def text(self, count: int, seed: int) -> Prompt:
        self.ids += torch.randint(1, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        return self

    def image(self, grid: Grid, seed: int, frame_seconds: float = 0.0, pooled: int = 1) -> Prompt:
        """Each frame has a run of placeholders of its own, unless there is a time between them. pooled: so many frames
        have one run with the placeholders of one frame."""
        image, runs = Image(grid, seed, frame_seconds), []
        frames_of_run = grid[0] if frame_seconds else 1
        count = frames_of_run * grid[1] * grid[2] // MERGE**2
        for _ in range(-(-grid[0] // (frames_of_run * pooled))):
            self.ids.append(BEGIN)
            runs.append((len(self.ids), len(self.ids) + count))
            self.ids += [VIDEO if image.kind == "video" else IMAGE] * count
            self.ids.append(END)
        self.spans.append((image, runs))
        return self

    def ids_for(self, kind: str) -> list[int]:
        """For models of this `model_type`."""
        return [IMAGE if token == VIDEO and kind in IMAGES_ALONE else token for token in self.ids]

    def items(self, directory: Path) -> list[MediaItem]:
        kind = model_type(directory)
        return [
            MediaItem(
                kind="image" if kind in IMAGES_ALONE else image.kind,
                digest=hashlib.blake2b(repr(image).encode(), digest_size=32).digest(),
                spans=runs,
                grid=grid_for(kind, image.grid),
                pixels=shared_array.write(directory, image.patches(kind)[:, : patch_values(directory)].numpy()),
                frame_seconds=image.frame_seconds,
            )
            for image, runs in self.spans
        ]

    def of_transformers(self) -> dict[str, torch.Tensor]:
        """What the reference takes beside ids, but for the types of tokens."""
        arguments = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            images = [image for image, _ in self.spans if image.kind == kind]
            if images:
                arguments[pixels] = torch.cat([image.pixels for image in images])
                arguments[grids] = torch.tensor([image.grid for image in images])
        return arguments


def _types(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([[1 if token == IMAGE else 2 if token == VIDEO else 0 for token in ids]])


def _of_kimi(pixels: torch.Tensor) -> torch.Tensor:
    """Patches [P, 3, 4, 4] of one frame."""
    return pixels[:, : PATCH_VALUES // 2].unflatten(1, (3, 4, 4))


def clips_of(model_type: str, grids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Grids of the frames that see one another, as the processors of Kimi K2.5 and of MiniMax-M3 (in transformers 5.23)
    give them to their models."""
    most = SEEN_FRAMES[model_type]
    return torch.tensor(
        [
            (min(most, frames - first), rows, columns)
            for frames, rows, columns in grids
            for first in range(0, frames, most)
        ]
    )


def _padded(images: Sequence[Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [frames, most patches, 48] of all frames, and their columns and rows, -1 for padding."""
    frames = [(image, part) for image in images for part in image.pixels[:, : PATCH_VALUES // 2].chunk(image.grid[0])]
    most = max(len(part) for _, part in frames)
    pixels, places = torch.zeros(len(frames), most, PATCH_VALUES // 2), torch.full((len(frames), most, 2), -1)
    for number, (image, part) in enumerate(frames):
        pixels[number, : len(part)] = part
        rows, columns = torch.meshgrid(*map(torch.arange, image.grid[1:]), indexing="ij")
        places[number, : len(part)] = torch.stack((columns.flatten(), rows.flatten()), dim=-1)
    return pixels, places


def _of_gemma(prompt: Prompt) -> dict[str, torch.Tensor]:
    arguments = {}
    images = [image for image, _ in prompt.spans if image.kind == "image"]
    videos = [image for image, _ in prompt.spans if image.kind == "video"]
    if images:
        arguments["pixel_values"], arguments["image_position_ids"] = _padded(images)
    if videos:
        assert len(videos) == 1
        pixels, places = _padded(videos)
        arguments |= {"pixel_values_videos": pixels[None], "video_position_ids": places[None]}
    return arguments


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, prompt: Prompt, output: Sequence[int] = ()) -> torch.Tensor:
    """[n, V] of the prompt and what was said behind it."""
    ids = [*prompt.ids_for(model.config.model_type), *output]
    arguments = prompt.of_transformers()
    if model.config.model_type == "inkling_mm_model":
        kind = model.config.model_type
        features = [of_views(model, image.patches(kind), image.grid) for image, _ in prompt.spans]
        return inkling_logits(model, ids, IMAGE, torch.cat(features or [torch.empty(0, SIZES["hidden_size"])]))
    if model.config.model_type in IMAGES_ALONE:
        speaker = model if model.config.model_type == "step3p7" else model.language_model
        return speaker(inputs_embeds=_embedded_views(model, prompt, ids)).logits[0]
    if model.config.model_type == "gemma4":
        arguments = _of_gemma(prompt) | {"mm_token_type_ids": _types(ids)}
        if "pixel_values_videos" in arguments and "num_frames_per_video" in inspect.signature(model.forward).parameters:
            for key in ("pixel_values_videos", "video_position_ids"):  # of all videos, as transformers 5.24 takes them
                arguments[key] = arguments[key].flatten(0, 1)
            arguments["num_frames_per_video"] = torch.tensor([len(arguments["pixel_values_videos"])])
    elif model.config.model_type == "kimi_k25":
        for key in ("pixel_values", "pixel_values_videos"):
            if key in arguments:
                arguments[key] = _of_kimi(arguments[key])
        if "video_grid_thw" in arguments:
            arguments["video_grid_thw"] = clips_of("kimi_k25", arguments["video_grid_thw"].tolist())
    elif model.config.model_type == "minimax_m3_vl":
        if "video_grid_thw" in arguments:
            arguments["video_grid_thw"] = clips_of("minimax_m3_vl", arguments["video_grid_thw"].tolist())
    elif model.config.model_type == "qwen2_5_vl":
        arguments["position_ids"] = _positions(prompt, len(ids), model.config.vision_config.tokens_per_second)
    else:
        arguments["mm_token_type_ids"] = _types(ids)
    return model(torch.tensor([ids]), **arguments).logits[0]


@torch.inference_mode()
def inkling_logits(model: Any, ids: Sequence[int], placeholder: int, features: torch.Tensor) -> torch.Tensor:
    """[n, V]. Features [placeholders, H] stand beside normed embeddings; transformers 5.17 norms both once more, and
    since 5.18 the norm is a part of the embedding."""
    text = model.model.language_model
    norm = getattr(text, "embed_norm", torch.nn.Identity())
    embedded = norm(text.embed_tokens(torch.tensor([ids])))
    embedded[0, torch.tensor(ids) == placeholder] = features
    if hasattr(text, "embed_norm"):
        text.embed_norm = torch.nn.Identity()
    hidden = text(inputs_embeds=embedded).last_hidden_state[0]
    if hasattr(text, "embed_norm"):
        text.embed_norm = norm
    logits: torch.Tensor = model.lm_head(hidden / model.config.text_config.logits_mup_width_multiplier)
    return logits


def _embedded_views(model: Any, prompt: Prompt, ids: Sequence[int]) -> torch.Tensor:
    """The features of each view in place of the embeddings of its placeholders, [1, length, H]."""
    embedded = model.get_input_embeddings()(torch.tensor([ids]))
    for image, runs in prompt.spans:
        kind = model.config.model_type
        features = of_views(model, image.patches(kind), grid_for(kind, image.grid))
        for part, (start, end) in zip(features.chunk(len(runs)), runs, strict=True):
            embedded[0, start:end] = part
    return embedded


def of_views(model: Any, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """What Step-3.7, Llama 4 and Inkling make of patches that stand row by row, [tokens, H]."""
    if model.config.model_type == "inkling_mm_model":
        side = model.config.vision_config.patch_size
        features: torch.Tensor = model.model.vision_tower(pixels.view(-1, 2, side, side, 3)).pooler_output
        return features.flatten(0, 1)
    inner = model.model if model.config.model_type == "step3p7" else model
    views = pixels[:, : PATCH_VALUES // 2].reshape(*grid, 3, 4, 4).permute(0, 3, 1, 4, 2, 5)
    seen = inner.vision_model(views.flatten(2, 3).flatten(3, 4)).last_hidden_state
    return inner.multi_modal_projector(seen).flatten(0, 1)


def _positions(prompt: Prompt, length: int, positions_a_second: int) -> torch.Tensor:
    """[3, 1, length] as Qwen2.5-VL was trained: text goes on behind the largest position of a video. transformers 5
    lets it go on behind the longer side of a frame, also where the time of the last one is later."""
    runs = {start: (image, end, len(runs)) for image, runs in prompt.spans for start, end in runs}
    result: list[tuple[int, int, int]] = []
    following = 0
    while len(result) < length:
        if len(result) not in runs:
            result.append((following,) * 3)
        else:
            image, _, num_runs = runs[len(result)]
            for frame in range(image.grid[0] // num_runs):
                time = int(frame * image.frame_seconds * positions_a_second)
                for row in range(image.grid[1] // MERGE):
                    result += [
                        (following + time, following + row, following + c) for c in range(image.grid[2] // MERGE)
                    ]
        following = max(map(max, result)) + 1
    return torch.tensor(result).T[:, None]


def greedy(model: transformers.PreTrainedModel, prompt: Prompt, output: Sequence[int]) -> list[int]:
    """What the model would have said where `output` stands: `output` itself, if it is the greedy continuation."""
    return reference_logits(model, prompt, output)[len(prompt.ids) - 1 : -1].argmax(-1).tolist()


class ReferenceEncoder:
    """The tower of a transformers model. Implements MediaEncoder."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.whole, self.model = model, getattr(model, "model", model)

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        if self.model.config.model_type == "gemma4":
            return [self._of_gemma(part, grid) for part, grid in zip(_split(pixels, grids), grids, strict=True)]
        if self.model.config.model_type == "kimi_k25":
            made = self.model.get_image_features(_of_kimi(pixels), clips_of("kimi_k25", grids)).pooler_output
            counts = [len(clips_of("kimi_k25", [grid])) * grid[1] * grid[2] // MERGE**2 for grid in grids]
            return list(torch.cat(list(made)).flatten(0, -2).split(counts))
        if self.model.config.model_type in IMAGES_ALONE:
            parts = zip(_split(pixels, grids), grids, strict=True)
            return [of_views(self.whole, part, grid) for part, grid in parts]
        frames = torch.tensor([(1, *grid[1:]) for grid in grids for _ in range(grid[0])])
        if self.model.config.model_type in SEEN_FRAMES:
            frames = clips_of(self.model.config.model_type, grids)
        made = self.model.get_image_features(pixels, frames)
        levels = [made.pooler_output, *(getattr(made, "deepstack_features", None) or [])]
        # transformers 5.24 has each level by image.
        whole = [level if isinstance(level, torch.Tensor) else torch.cat(level) for level in levels]
        features = torch.cat(whole, dim=1)
        return list(features.split((torch.tensor(grids).prod(1) // MERGE**2).tolist()))

    def _of_gemma(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        rows, columns = torch.meshgrid(*map(torch.arange, grid[1:]), indexing="ij")
        places = torch.stack((columns.flatten(), rows.flatten()), dim=-1).expand(grid[0], -1, -1)
        return torch.cat(self.model.get_image_features(pixels.unflatten(0, (grid[0], -1)), places).pooler_output)


def _split(pixels: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
    return pixels.split([frames * rows * columns for frames, rows, columns in grids])


def args_of(folder: Path, **options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True,
        **{"max_total_tokens": 2048, "max_running_requests": 8, **options},
    )  # fmt: skip


def seeing_scheduler(
    folder: Path, encoder: MediaEncoder | None = None, rank: int = 0, rendezvous: str | None = None, **options: Any
) -> Any:
    """Returns a scheduler, or those of attention groups. Pixels lie in the folder of the model. encoder None: the
    model's own."""
    args = args_of(folder, **options)
    runner = create_runner(args, rank, rendezvous, create_encoder=None if encoder is None else lambda plan: encoder)
    assert runner.media is not None
    runner.media.directory = folder
    return (AttentionGroups if args.attn_dp_size > 1 else Scheduler)(args, runner, StopChecker(None))


def again_in_graphs(scheduler: Any, play: Callable[[Any], Played]) -> Played:
    """Plays once more with nothing in any cache, steps in stand-ins of graphs; some of them are with features, unless
    images see themselves both ways."""
    runner = scheduler.runner
    assert scheduler.flush_cache()
    with_attention(runner, DeviceLengths(), DeviceLengths())
    with in_graphs(runner, GraphSizes((1, 2, 4, 8), (8, 16, 32), (0, 4))) as replays:
        outcome = play(scheduler)
    media = [step.prompts.media for step in replays if step.prompts is not None and step.prompts.media is not None]
    both_ways, groups = runner.state.features.description.both_ways, runner.plan.ranks.attn_dp_size > 1
    assert all(part.runs is None for part in media)
    assert any(part.sources for part in media) != both_ways or groups, "a group may have texts alone"
    return outcome


def media_request(rid: str, prompt: Prompt, directory: Path, new_tokens: int, **params: Any) -> TokenizedGenerateReq:
    msg = request(rid, prompt.ids_for(model_type(directory)), new_tokens, temperature=0.0, ignore_eos=True, **params)
    msg.media = prompt.items(directory)
    return msg
