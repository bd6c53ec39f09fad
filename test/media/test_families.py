"""Servers of tiny models in the published layouts of Kimi K2.5 (experts in INT4 and in NVFP4), Qwen3-VL, GLM-4.5V,
Gemma 4, Qwen3.8-Flash-Next, MiniMax-M3, Step-3.7, Muse-Glimmer, Llama 4 and Inkling: pictures and MP4 files over HTTP
get the tokens of transformers' models, and real clients their answers."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
import torch
import transformers
from live_server import LiveServer
from pairs import some
from safetensors.torch import load_file, save_file
from srt.models.harness import SIZES, randomize
from srt.models.media_corrections import CORRECTIONS
from srt.models.media_harness import (
    ALONE,
    GEMMA_VISION,
    GLM_ROPE,
    GLM_VISION,
    SECTIONS,
    SEEING,
    SEEN_FRAMES,
    TOWER,
    assignments,
    clips_of,
    inkling_logits,
    of_views,
)
from srt.models.media_harness import PUBLISHED as LAYOUTS
from srt.models.quantized_checkpoints import FORMS, Form, join_experts, split_experts

from media.moving_pictures import video_file
from media.pictures import data_url, encoded, picture
from media.processing import image_views, video_processor
from media.seeing_model import FIRST_ID, SPECIAL, TEMPLATE, write_seeing_model
from sglang.srt.managers.front.media.containers import open_video
from sglang.srt.managers.front.media.media_tokens import media_tokens
from sglang.srt.towers.pictures.patches import Patches
from sglang.srt.towers.pictures.processor_files import ProcessorFiles, read_processor_files

NEW_TOKENS = 12
PICTURE, MOVIE = picture(96, 64), video_file()
OF_QWEN = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")


@dataclass(frozen=True)
class Published:
    """`special`: tokens behind those of text; `image`, `video`: what templates write. `experts`: the form in which
    experts are stored."""

    name: str
    special: tuple[str, ...]
    image: str
    video: str
    config: dict[str, str]
    vision: dict[str, Any]
    text: dict[str, Any]
    processor: dict[str, Any]
    video_processor: dict[str, Any]
    experts: str | None = None


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
GLM_MARKS = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)
KIMI_MARKS = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
KIMI = Published(
    "kimi_k25",
    KIMI_MARKS,
    "{}image{}{}{}".format(*KIMI_MARKS),
    "<|kimi_k25_video_placeholder|>",
    {"image_token_id": "<|media_pad|>", "video_token_id": "<|media_pad|>"},
    {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}
    | {"pos_emb_height": 8, "pos_emb_width": 8},
    {"moe_intermediate_size": 128, "hidden_size": 128, "n_group": 1, "topk_group": 1},
    {
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_size": 14,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 4096,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        }
    },
    {},
)
PUBLISHED = {
    "kimi_k25 in INT4": replace(KIMI, experts="compressed_int4_g32"),
    "kimi_k25 in NVFP4": replace(KIMI, experts="modelopt_nvfp4"),
    "qwen3_vl": Published(
        "qwen3_vl",
        SPECIAL,
        *OF_QWEN,
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        | {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
        TOWER | {"deepstack_visual_indexes": [0, 2], "patch_size": 16},
        {"rope_parameters": SECTIONS},
        {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2, **HALF}
        | {"temporal_patch_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 1 << 18}},
        {"fps": 2, "min_frames": 4, "max_frames": 8},
    ),
    "glm4v_moe": Published(
        "glm4v_moe",
        GLM_MARKS,
        "".join((GLM_MARKS[0], GLM_MARKS[2], GLM_MARKS[1])),
        "".join((GLM_MARKS[3], GLM_MARKS[5], GLM_MARKS[4])),
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": GLM_MARKS[0]},
        TOWER | GLM_VISION | {"patch_size": 14, "image_size": 112},
        {"rope_parameters": GLM_ROPE},
        {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2}
        | {"size": {"shortest_edge": 3136, "longest_edge": 1 << 17}},
        {"fps": 2, "size": {"shortest_edge": 3136, "longest_edge": 1 << 17}},
    ),
    "gemma4": Published(
        "gemma4",
        ("<|image|>", "<|video|>", "<|image>", "<image|>"),
        "<|image|>",
        "<|video|>",
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "boi_token_id": "<|image>"}
        | {"eoi_token_id": "<image|>"},
        GEMMA_VISION | {"patch_size": 16, "pooling_kernel_size": 3, "standardize": True},
        {},
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "pooling_kernel_size": 3}
        | {"patch_size": 16, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        {"num_frames": 3, "max_soft_tokens": 70},
    ),
}


M3_MARKS = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
PUBLISHED["qwen4_exp"] = replace(
    PUBLISHED["qwen3_vl"], name="qwen4_exp", vision=TOWER | {"patch_size": 16}, text={"eos_token_id": 7}
)
PUBLISHED["minimax_m3_vl"] = Published(
    "minimax_m3_vl",
    M3_MARKS,
    *M3_MARKS[:2],
    {"image_token_index": M3_MARKS[0], "video_token_index": M3_MARKS[1]},
    {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14},
    {},
    {"image_processor_type": "MiniMaxM3VLImageProcessor", "size": [672, 672], "patch_size": 14, "merge_size": 2},
    {"fps": 1, "max_frames": 6},
)
PUBLISHED["step3p7"] = Published(
    "step3p7",
    ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>"),
    "<im_patch>",
    "",
    {"image_token_id": "<im_patch>"},
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 84, "patch_size": 7}
    | {"mlp_ratio": 1.5},
    {},
    {"image_processor_type": "Step3p7ImageProcessor", "size": {"height": 56, "width": 56}, "patch_size": 28}
    | {"vision_patch_size": 7},
    {},
)
"""It takes no video; of the picture it sees 12 tiles and the whole."""
MUSE_MARKS = ("<|patch|>", "<|video|>", "<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_frame_separator|>")
PUBLISHED["muse_glimmer"] = Published(
    "muse_glimmer",
    (*MUSE_MARKS, "<|vid_end|>"),
    *MUSE_MARKS[:2],
    {"image_token_id": "<|patch|>", "video_token_id": "<|video|>"},
    {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14}
    | {"pos_emb_height": 3, "pos_emb_width": 3},
    {},
    {"image_processor_type": "MuseGlimmerImageProcessor", "patch_size": 14, "merge_size": 2, **HALF}
    | {"temporal_patch_size": 2, "max_image_tokens": 4096},
    {"fps": 2.0, "num_frames": 6, "max_video_frame_tokens": 9},
)
PUBLISHED["llama4"] = Published(
    "llama4",
    ("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    "<|image|>",
    "",
    {"image_token_index": "<|patch|>"},
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    | {"image_size": 56, "vision_output_dim": 40, "projector_input_dim": 40, "projector_output_dim": 40},
    {},
    {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 56, "width": 56}, "max_patches": 6, **HALF},
    {},
)
"""It takes no video; of the picture it sees 4 tiles and the whole."""
PUBLISHED["inkling_mm_model"] = Published(
    "inkling_mm_model",
    ("<|content_image|>", "<|unused_200054|>"),
    "<|content_image|><|unused_200054|>",
    "",
    {"image_token_id": "<|unused_200054|>"},
    {"patch_size": 10, "num_hidden_layers": 2},
    {},
    {"image_processor_type": "InklingImageProcessor", "size": {"height": 10, "width": 10}, **HALF}
    | {"rescale_image_frac": 0.5},
    {},
)
"""It takes no video; of the picture it sees 4 x 5 patches."""
PLACES = {
    "inkling_mm_model": {"image": 1},
    "llama4": {"image": 1},
    "muse_glimmer": {"image": 0, "video": 1},
    "step3p7": {"image": 0},
    "qwen4_exp": {"image": 2, "video": 3},
    "minimax_m3_vl": {"image": 0, "video": 1},
    "kimi_k25": {"image": 2, "video": 2},
    "qwen3_vl": {"image": 2, "video": 3},
    "glm4v_moe": {"image": 2, "video": 2},
    "gemma4": {"image": 0, "video": 1},
}
"""Which of the special tokens stands for an embedding."""
AROUND = {
    ("inkling_mm_model", "image"): ("<|content_image|>", ""),
    ("kimi_k25", "image"): ("<|media_begin|>image<|media_content|>", "<|media_end|>"),
    ("qwen3_vl", "image"): SPECIAL[:2],
    ("qwen4_exp", "image"): SPECIAL[:2],
    ("glm4v_moe", "image"): GLM_MARKS[:2],
    ("glm4v_moe", "video"): GLM_MARKS[3:5],
}
"""What a template writes around a placeholder."""


def write_model(form: Published, folder: Path) -> transformers.PreTrainedModel:
    """A checkpoint as it is published, with random weights."""
    write_seeing_model(folder)
    ids = {token: FIRST_ID + number for number, token in enumerate(form.special)}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    kept = [token for token in tokenizer["added_tokens"] if token["id"] < FIRST_ID]
    tokenizer["added_tokens"] = kept + [{"id": number, "content": token, **plain} for token, number in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = TEMPLATE.replace(OF_QWEN[1], form.video).replace(OF_QWEN[0], form.image)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(form.processor))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(form.processor | form.video_processor))
    class_name, text, _, zero_centred = SEEING[form.name]
    text = SIZES | text | form.text | {"vocab_size": FIRST_ID + 64, "max_position_embeddings": 1024}
    text |= {"vocab_size_per_layer_input": FIRST_ID + 64} if form.name == "gemma4" else {}
    named = {key: ids[token] for key, token in form.config.items()}
    settings = copy.deepcopy({"text_config": text, "vision_config": form.vision, **named})
    settings |= {"audio_config": None, "audio_token_id": FIRST_ID + 63} if form.name == "gemma4" else {}
    settings |= {"projection_hidden_size": form.vision["hidden_size"]} if form.name == "kimi_k25" else {}
    settings |= {"projector_hidden_size": 40} if form.name in ("minimax_m3_vl", "muse_glimmer") else {}
    settings |= {"out_hidden_size": 4 * form.vision["hidden_size"]} if form.name == "muse_glimmer" else {}
    config = getattr(transformers, class_name)(**settings)
    torch.manual_seed(0)
    with assignments() if form.name in ALONE else contextlib.nullcontext():
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model, zero_centred)
    if form.name in CORRECTIONS:
        CORRECTIONS[form.name](model)
    for key, param in model.named_parameters():
        if ("visual." in key or "vision_tower." in key) and "norm" in key:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    for key, buffer in model.named_buffers():
        if "vision_tower.std_" in key:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    with torch.no_grad():
        model.get_output_embeddings().weight[FIRST_ID:] = 0.0  # nobody says a placeholder
    model.save_pretrained(folder)
    if form.name in LAYOUTS:
        LAYOUTS[form.name](folder)
    if form.experts is not None:
        quantize_experts(model, FORMS[form.experts], folder)
    return model


def quantize_experts(model: transformers.PreTrainedModel, form: Form, folder: Path) -> None:
    """Stores the experts in `form`, and gives the model the values that they stand for."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    split_experts(tensors)
    stand_for: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        made, stand_for[name] = form.write(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{leaf}": value.contiguous() for leaf, value in made.items()}
    save_file(tensors, file)
    join_experts(stand_for)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".mlp.experts." in name:
                layer = re.search(r"\.(\d+)\.mlp\.experts\.(\w+)$", name)
                assert layer is not None
                param.copy_(stand_for[f"language_model.model.layers.{layer[1]}.mlp.experts.{layer[2]}"])
    config = json.loads((folder / "config.json").read_text())
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    if form.config:
        config["text_config"]["quantization_config"] = dict(form.config) | {"ignore": ignore}
        (folder / "config.json").write_text(json.dumps(config))
        return
    kept = ["language_model.lm_head", *(f"language_model.model.layers.{i}.self_attn*" for i in range(3))]
    kept += [f"language_model.model.layers.{i}.mlp.shared_experts*" for i in range(1, 3)]
    kept += ["language_model.model.layers.0*", "mm_projector*", "vision_tower*"]
    inner = form.modelopt["quantization"] | {"exclude_modules": kept}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))


class Served:
    def __init__(self, form: Published, folder: Path) -> None:
        self.form, self.folder = form, folder
        self.model = write_model(form, folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = media_tokens(json.loads((folder / "config.json").read_text()))
        assert tokens is not None
        self.files: ProcessorFiles = read_processor_files(folder, tokens.family, "{}")
        self.server = LiveServer(
            *("--model-path", str(folder), "--served-model-name", "seeing", "--dtype", "float32"),
            *("--max-total-tokens", "4096", "--skip-server-warmup"),
        )

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found

    def of_image(self) -> tuple[list[int], list[Patches]]:
        views = image_views(self.files, "float32")(PICTURE)
        placeholder = self.placeholder("image")
        written = "".join(part if isinstance(part, str) else placeholder * part for part in views.parts)
        return self.ids(f"<|image>{written}<image|>" if self.form.name == "gemma4" else written), views.patches

    def placeholder(self, kind: str) -> str:
        """The token that stands for an embedding."""
        return self.form.special[PLACES[self.form.name][kind]]

    def of_video(self) -> tuple[list[int], list[Patches]]:
        """Written as transformers' processors write it."""
        result = video_processor(self.files)(open_video(MOVIE))
        pooled = 4 if self.form.name == "kimi_k25" else 1
        count = result.patches.num_tokens // len(result.times[::pooled])
        if self.form.name == "gemma4":
            clocks = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in result.times]
            text = " ".join(f"{clock} <|image>{'<|video|>' * count}<image|>" for clock in clocks)
        elif self.form.name == "kimi_k25":
            texts = [
                f"00:00:{time:06.3f}<|media_begin|>video<|media_content|>{'<|media_pad|>' * count}<|media_end|>"
                for time in result.times[::4]
            ]
            text = "".join(texts)
        elif self.form.name == "minimax_m3_vl":
            frame = f"]<]start of image[>[{']<]video[>[' * count}]<]end of image[>["
            text = "".join(f"]<]{time:.1f} seconds[>[{frame}" for time in result.times)
        elif self.form.name == "muse_glimmer":
            frames = [f"Time: {time:.1f}s{'<|video|>' * count}" for time in result.times]
            text = f"<|vid_start|>{'<|vid_frame_separator|>'.join(frames)}<|vid_end|>"
        elif self.form.name in ("qwen3_vl", "qwen4_exp"):
            frame = f"<|vision_start|>{'<|video_pad|>' * count}<|vision_end|>"
            text = "".join(f"<{time:.1f} seconds>{frame}" for time in result.times)
        else:
            frame = f"<|begin_of_image|>{'<|image|>' * count}<|end_of_image|>"
            text = "".join(f"{frame}{int(time)}" for time in result.times)
        return self.ids(text), [result.patches]

    def greedy(self, kind: str, output: list[int]) -> list[int]:
        """What the model would have said where `output` stands behind `Look: PLACEHOLDER What is it?`."""
        before, after = self.ids("Look: "), self.ids(" What is it?")
        media, views = self.of_image() if kind == "image" else self.of_video()
        if (self.form.name, kind) in AROUND:
            marks = [self.ids(mark) for mark in AROUND[self.form.name, kind]]
            media = [*marks[0], *media, *marks[1]]
        prompt = [*before, *media, *after]
        if self.form.name in ALONE:
            features = of_views(self.model, torch.from_numpy(views[0].pixels), views[0].grid)
            logits = inkling_logits(self.model, [*prompt, *output], self.ids(self.placeholder(kind))[0], features)
            return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        whole = torch.tensor([[*prompt, *output]])
        arguments = self.inputs_of_views(views) if self.form.name == "step3p7" else self.inputs(kind, views[0])
        if self.form.name not in ("kimi_k25", "minimax_m3_vl", "step3p7", "llama4"):
            arguments["mm_token_type_ids"] = (whole == self.ids(self.placeholder(kind))[0]).int()
            arguments["mm_token_type_ids"] *= 1 if kind == "image" else 2
        logits = self.model(whole, **arguments).logits[0]
        said: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return said

    def inputs_of_views(self, views: list[Patches]) -> dict[str, Any]:
        """Tiles, and the whole."""

        def pictures(patches: Patches) -> torch.Tensor:
            pixels = torch.from_numpy(patches.pixels).reshape(*patches.grid, 3, 7, 7)
            return pixels.permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4)

        tiles, whole = map(pictures, views)
        assert tiles.shape == (12, 3, 28, 28) and whole.shape == (1, 3, 56, 56)
        return {"pixel_values": whole, "pixel_values_local": tiles, "num_local_patches": [len(tiles)]}

    def inputs(self, kind: str, patches: Patches) -> dict[str, torch.Tensor]:
        pixels, (frames, rows, columns) = torch.from_numpy(patches.pixels), patches.grid
        if self.form.name == "llama4":
            tiles = pixels.view(frames, rows, columns, 3, 14, 14).permute(0, 3, 1, 4, 2, 5)
            assert len(tiles) == 5
            return {"pixel_values": tiles.flatten(2, 3).flatten(3, 4)}
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        if self.form.name == "kimi_k25":
            return {name: pixels.unflatten(1, (3, 14, 14)), f"{kind}_grid_thw": clips_of("kimi_k25", [patches.grid])}
        if self.form.name in SEEN_FRAMES:
            return {name: pixels, f"{kind}_grid_thw": clips_of(self.form.name, [patches.grid])}
        if self.form.name != "gemma4":
            return {name: pixels, f"{kind}_grid_thw": torch.tensor([patches.grid])}
        down, right = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places = torch.stack((right.flatten(), down.flatten()), dim=-1).expand(frames, -1, -1)
        pixels = pixels.unflatten(0, (frames, -1))
        return {name: pixels if kind == "image" else pixels[None]} | {
            f"{kind}_position_ids": places if kind == "image" else places[None]
        }


_AT_ONCE = ("gemma4", "kimi_k25 in INT4")


@pytest.fixture(scope="module", params=some(PUBLISHED, _AT_ONCE))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(PUBLISHED[request.param], tmp_path_factory.mktemp(request.param))
    try:
        served.server.wait_up()
        yield served
    finally:
        served.server.end()


@torch.inference_mode()
def test_tokens_are_those_of_transformers(served: Served) -> None:
    urls = {"image": data_url(encoded(PICTURE)), "video": data_url(MOVIE, "video/mp4")}
    for kind in ("image", "video") if served.form.video else ("image",):
        url = urls[kind]
        placeholder = served.form.image if kind == "image" else served.form.video
        body = {"text": f"Look: {placeholder} What is it?", f"{kind}_data": url}
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{served.server.url}/generate", json=body | {"sampling_params": params}, timeout=300)
        assert answer.status_code == 200, answer.text
        output = answer.json()["output_ids"]
        assert len(output) == NEW_TOKENS and output == served.greedy(kind, output), kind


def test_conversations_by_real_clients(served: Served) -> None:
    """openai, anthropic and ollama are told the same about a picture; openai takes a video, too."""
    url, picture_file = served.server.url, encoded(PICTURE)
    of_openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    shown: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(picture_file)}}]
    words: list[Any] = [{"type": "text", "text": "What is this?"}]

    def chat(content: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return of_openai.chat.completions.create(model="seeing", messages=messages, max_tokens=8, temperature=0)

    first = chat(shown + words)
    assert first.usage.prompt_tokens > len(served.of_image()[0]) and first.choices[0].message.content
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture_file).decode()}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}, *words]}]
    of_anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
    second = of_anthropic.messages.create(
        model="seeing", messages=messages, max_tokens=8, extra_body={"temperature": 0}
    )
    assert second.usage.input_tokens == first.usage.prompt_tokens
    assert "".join(getattr(block, "text", "") for block in second.content) == first.choices[0].message.content
    third = ollama.Client(host=url, timeout=300).chat(
        model="seeing",
        messages=[{"role": "user", "content": "What is this?", "images": [picture_file]}],
        options={"num_predict": 8, "temperature": 0},
    )
    assert third.prompt_eval_count == first.usage.prompt_tokens
    assert third.message.content == first.choices[0].message.content
    if not served.form.video:
        return
    film = {"type": "video_url", "video_url": {"url": data_url(MOVIE, "video/mp4")}}
    expected = len(served.of_image()[0]) + len(served.of_video()[0])
    assert chat([*words, *shown, film]).usage.prompt_tokens > expected
    assert chat([film, *words, *shown]).usage.prompt_tokens > expected


def test_a_damaged_video_is_refused(served: Served) -> None:
    body = {"text": f"Look: {served.form.video}", "video_data": data_url(MOVIE[: len(MOVIE) // 2], "video/mp4")}
    answer = httpx.post(f"{served.server.url}/generate", json=body, timeout=300)
    reason = "damaged" if served.form.video else "videos are not read by this model"
    assert answer.status_code == 400 and reason in answer.text, answer.text
