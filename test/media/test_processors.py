"""Decoding, and the patches of each family, against the classes of transformers and plain arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from media.pictures import animation, encoded, picture
from media.processing import image_processor
from media.seeing_model import write_seeing_model
from sglang.srt.errors import UserError
from sglang.srt.managers.front.media import decoding
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.muse_glimmer.processor import nearest_shape
from sglang.srt.towers.pictures.merged import transformers_class
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import ImageProcessor
from sglang.srt.towers.pictures.processor_files import ProcessorFiles, read_processor_files

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def make(family: str, **settings: Any) -> ImageProcessor:
    return image_processor(ProcessorFiles(family, {**HALF, **settings}, {}))


@pytest.mark.parametrize(
    ("family", "settings", "patch", "merge"),
    [
        ("qwen3_vl", {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 262144}}, 16, 2),
        ("qwen2_5_vl", {}, 14, 2),
        ("glm4v", {}, 14, 2),
        ("glm46v", {}, 14, 2),
        ("glm5_next", {}, 14, 2),
        ("kimi_k25", {}, 14, 2),
        ("minimax_m3", {}, 14, 2),
        ("muse_glimmer", {}, 14, 2),
    ],
)
def test_tokens_follow_from_the_grid(family: str, settings: dict[str, Any], patch: int, merge: int) -> None:
    patches = make(family, **settings)(picture(200, 120))
    frames, rows, columns = patches.grid
    assert patches.pixels.shape[0] == frames * rows * columns == patches.num_tokens * merge**2
    assert patches.pixels.shape[1] % (3 * patch**2) == 0
    assert columns > rows


def test_patches_of_gemma_are_whole_squares_of_the_pool() -> None:
    patches = make("gemma4", patch_size=16, pooling_kernel_size=3, max_soft_tokens=70)(picture(200, 120))
    _, rows, columns = patches.grid
    assert len(patches.pixels) == rows * columns == 9 * patches.num_tokens
    assert rows % 3 == columns % 3 == 0 and patches.num_tokens <= 70


def test_kimi_keeps_the_size_and_adds_black() -> None:
    patches = make("kimi_k25")(Image.new("RGB", (30, 20), "white"))
    assert patches.grid == (1, 2, 4)
    first = patches.pixels.reshape(2, 4, 3, 14, 14)
    assert (first[0, 0] == 1).all() and (first[0, 3] == -1).all()
    whole = first.transpose(2, 0, 3, 1, 4).reshape(3, 28, 56)
    assert (whole[:, :20, :30] == 1).all() and (whole[:, 20:] == -1).all() and (whole[:, :, 30:] == -1).all()


@pytest.mark.parametrize(
    ("size", "grid"),
    [((200, 120), (1, 8, 14)), ((1280, 720), (1, 36, 64)), ((30, 20), (1, 4, 6)), ((50, 700), (1, 50, 4))]
    + [((1000, 9), (1, 2, 44)), ((3100, 900), (1, 24, 88)), ((672, 672), (1, 48, 48))],
)
def test_sizes_of_minimax_m3(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    """As the class of transformers 5.23 has them; the `size` of published files is not used."""
    assert make("minimax_m3", size=[672, 672])(picture(*size)).grid == grid


@pytest.mark.parametrize(
    ("size", "grid"),
    [((200, 120), (1, 10, 16)), ((1280, 720), (1, 52, 92)), ((30, 20), (1, 2, 4)), ((50, 700), (1, 50, 4))]
    + [((1000, 9), (1, 2, 72)), ((3100, 900), (1, 64, 220)), ((100, 100), (1, 8, 8)), ((4000, 4000), (1, 128, 128))]
    + [((60000, 40), (1, 2, 4284))],
)
def test_sizes_of_muse_glimmer(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    """As the class of transformers 5.17 has them, with torchvision 0.28."""
    width, height = nearest_shape(size, 28, 4096)
    assert (1, height // 14, width // 14) == grid


def test_patches_of_muse_glimmer_have_frame_behind_frame() -> None:
    """Each with its colours together, row by row."""
    image = picture(56, 28)
    process = make("muse_glimmer", patch_size=14)
    patches = process(image).pixels.reshape(2, 4, 2, 3, 14, 14)
    want = (np.asarray(image, np.float32) / 127.5 - 1).reshape(2, 14, 4, 14, 3).transpose(0, 2, 4, 1, 3)
    for frame in range(2):
        np.testing.assert_allclose(patches[:, :, frame], want, atol=1e-6)


def test_an_image_of_muse_glimmer_fits_an_encoder_step() -> None:
    patches = make("muse_glimmer", max_image_tokens=100000)(Image.new("RGB", (2000, 1900)))
    assert PATCHES_A_STEP * 3 // 4 < len(patches.pixels) <= PATCHES_A_STEP
    assert make("muse_glimmer", max_image_tokens=9)(picture(300, 290)).num_tokens == 9


def patches_of_inkling(image: Image.Image, side: int, mean: np.ndarray, std: np.ndarray) -> list[np.ndarray]:
    """One after the other: rows that hold something of the picture, and one column more than it has whole ones; what
    is missing of a patch has the level -1 in every colour."""
    pixels, patches = np.asarray(image, np.float64), []
    for top in range(0, image.height, side):
        for left in range(0, image.width + 1, side):
            part = np.full((side, side, 3), -1.0)
            here = pixels[top : top + side, left : left + side]
            part[: here.shape[0], : here.shape[1]] = here
            patches.append(np.stack([(part / 255 - mean) / std] * 2))
    return patches


@pytest.mark.parametrize("size", [(80, 40), (79, 41), (1, 1), (39, 120), (200, 7)])
def test_patches_of_inkling(size: tuple[int, int]) -> None:
    """Of pictures that have whole patches and of others; in 16 bits they are rounded once."""
    mean, std = np.array([0.2, 0.4, 0.6]), np.array([0.9, 0.3, 0.7])
    image, settings = picture(*size), {"image_mean": list(mean), "image_std": list(std)}
    got = make("inkling", **settings)(image)
    want = np.stack(patches_of_inkling(image, 40, mean, std)).astype(np.float32)
    assert got.grid == (1, -(-size[1] // 40), size[0] // 40 + 1) and got.num_tokens == len(want)
    np.testing.assert_allclose(got.pixels, want.reshape(len(want), -1), rtol=0, atol=1e-6)
    in_16 = image_processor(ProcessorFiles("inkling", settings, {}), "bfloat16")(image)
    assert np.array_equal(in_16.pixels, as_type(got.pixels, "bfloat16"))


@pytest.mark.parametrize(
    ("size", "settings", "seen"),
    [
        ((300, 200), {}, (300, 200)),
        ((300, 200), {"rescale_image_frac": 2.0}, (600, 400)),
        ((301, 33), {"rescale_image_frac": 0.5}, (151, 17)),
        ((1500, 1000), {"rescale_image_frac": 2.0}, (2048, 1365)),
        ((300, 200), {"rescale_image_frac": 2.0, "rescale_image_max_upscaled_long_edge": 450}, (450, 300)),
        ((2400, 30), {"rescale_image_frac": 2.0}, (2400, 30)),
        ((900, 1), {"rescale_image_frac": 0.25}, (225, 1)),
    ],
)
def test_sizes_of_inkling(size: tuple[int, int], settings: dict[str, Any], seen: tuple[int, int]) -> None:
    """As the class of transformers 5.17 has them; of a side it leaves a pixel at least."""
    got, image = make("inkling", **settings)(picture(*size)), picture(*size)
    want = make("inkling")(image if seen == size else image.resize(seen, Image.Resampling.LANCZOS))
    assert got.grid == want.grid == (1, -(-seen[1] // 40), seen[0] // 40 + 1)
    assert np.array_equal(got.pixels, want.pixels)


def test_an_image_of_inkling_that_fits_no_encoder_step_is_refused() -> None:
    with pytest.raises(ValueError, match="16,770 patches are more than an encoder step has .16,384."):
        make("inkling", size={"height": 2, "width": 2})(Image.new("RGB", (256, 260)))


def test_a_strip_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 200 times the other"):
        make("minimax_m3")(picture(2020, 10))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"])
def test_each_format_is_read(form: str) -> None:
    decoded = np.asarray(decoding.decode_image(encoded(picture(), form))).astype(int)
    assert np.abs(decoded - np.asarray(picture())).mean() < 12


def test_modes_and_orientation() -> None:
    red = np.array([255, 0, 0])

    def colour(image: Image.Image, form: str = "PNG", **options: Any) -> np.ndarray:
        return np.asarray(decoding.decode_image(encoded(image, form, **options)))[0, 0]

    assert np.abs(colour(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG") - red).max() < 4
    assert (colour(Image.new("RGBA", (16, 16), (0, 0, 0, 0))) == 255).all()
    assert (colour(Image.new("P", (16, 16))) == 0).all()
    assert (colour(Image.new("1", (16, 16), 1)) == 255).all()
    assert (colour(Image.new("LA", (16, 16), (7, 255))) == 7).all()
    deep = Image.fromarray(np.full((16, 16), 32768, np.uint16))
    assert (colour(deep) == 128).all()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decoding.decode_image(encoded(picture(96, 64), "JPEG", exif=exif)).size == (64, 96)


def test_of_an_animation_an_image_is_the_first_picture_and_low_detail_is_small() -> None:
    assert (np.asarray(decoding.decode_image(animation())) == 0).all()
    assert decoding.decode_image(encoded(picture(2000, 1000)), "low").size == (512, 256)
    assert decoding.decode_image(encoded(picture(20, 10)), "low").size == (20, 10)


def test_settings_come_from_either_form_of_files_and_the_flag_wins(tmp_path: Path) -> None:
    directory = write_seeing_model(tmp_path / "model")
    files = read_processor_files(directory, "qwen3_vl", '{"image": {"max_pixels": 4096}}')
    assert files.image["size"]["longest_edge"] == 4096 and files.video["fps"] == 2
    image = json.loads((directory / "preprocessor_config.json").read_text())
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (directory / name).unlink()
    with pytest.raises(UserError, match="language-model-only"):
        read_processor_files(directory, "qwen3_vl", "{}")
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": image}))
    assert read_processor_files(directory, "qwen3_vl", "{}").image == image
    with pytest.raises(UserError, match="mm-process-config"):
        read_processor_files(directory, "qwen3_vl", '{"audio": {}}')


def test_an_image_is_made_to_fit_an_encoder_step(tmp_path: Path) -> None:
    """As published: 16 million pixels would be four times what the memory plan counts."""
    folder = write_seeing_model(tmp_path)
    path = folder / "preprocessor_config.json"
    published = json.loads(path.read_text()) | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    path.write_text(json.dumps(published))
    files = read_processor_files(folder, "qwen3_vl", "{}")
    frames, rows, columns = image_processor(files)(picture(3000, 2900)).grid
    assert PATCHES_A_STEP // 2 < frames * rows * columns <= PATCHES_A_STEP


def test_the_processors_of_glm_are_told_by_their_files(tmp_path: Path) -> None:
    """Limits of theirs count the pixels of both frames that an image stands for."""
    published = {"patch_size": 14, "size": {"shortest_edge": 12544, "longest_edge": 47040000}, **HALF}
    for name, family in (("Glm46VImageProcessor", "glm46v"), ("Glm4vImageProcessor", "glm4v")):
        said = json.dumps(published | {"image_processor_type": name})
        (tmp_path / "preprocessor_config.json").write_text(said)
        files = read_processor_files(tmp_path, "glm4v", "{}")
        assert files.family == family
        frames, rows, columns = image_processor(files)(picture(3000, 2900)).grid
        assert PATCHES_A_STEP * 3 // 4 < frames * rows * columns <= PATCHES_A_STEP


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_image_tokens": 40, "max_image_tokens": 60, "patch_size": 16},
        {"temporal_patch_size": 1, "image_mean": [0.2, 0.4, 0.6], "image_std": [0.9, 0.3, 0.7]},
        {"max_image_tokens": 9, "min_image_tokens": 2, "do_normalize": False},
    ],
    ids=str,
)
def test_pictures_on_a_canvas_are_those_of_transformers(settings: dict[str, Any]) -> None:
    """To the bit, of GLM-5.3-Flash: sizes that are kept, enlarged and made smaller, all with their shape."""
    kind = transformers_class("glm5_next.image_processing_pil_glm5_next", "Glm5NextImageProcessorPil", HALF | settings)
    process = image_processor(ProcessorFiles("glm5_next", HALF | settings, {}))
    for width, height in ((112, 56), (30, 20), (400, 300), (1001, 37), (3, 900)):
        want, got = kind(picture(width, height), return_tensors="np"), process(picture(width, height))
        assert tuple(want["image_grid_thw"][0]) == got.grid
        assert np.array_equal(want["pixel_values"], got.pixels)
        assert len(got.pixels) == got.num_tokens * kind.merge_size**2


def test_a_canvas_fits_an_encoder_step() -> None:
    """As published, 8,000 tokens: twice what the memory plan counts."""
    frames, rows, columns = image_processor(ProcessorFiles("glm5_next", HALF, {}))(picture(3000, 2900)).grid
    assert PATCHES_A_STEP * 3 // 4 < frames * rows * columns <= PATCHES_A_STEP


PUBLISHED_KIMI = {
    "in_patch_limit": 1 << 20,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 20,
}


def test_settings_of_published_kimi_models(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"media_proc_cfg": PUBLISHED_KIMI}))
    files = read_processor_files(tmp_path, "kimi_k25", "{}")
    assert files.image["max_patches"] == PATCHES_A_STEP and files.image["size"]["max_height"] == 20
    assert image_processor(files)(picture(560, 280)).grid == (1, 10, 20)
    file.write_text(json.dumps({"media_proc_cfg": PUBLISHED_KIMI | {"fixed_output_tokens": 64}}))
    with pytest.raises(UserError, match="fixed_output_tokens"):
        read_processor_files(tmp_path, "kimi_k25", "{}")


_CLASSES = {
    "qwen3_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "glm4v": ("glm4v.image_processing_pil_glm4v", "Glm4vImageProcessorPil"),
    "glm46v": ("glm46v.image_processing_pil_glm46v", "Glm46VImageProcessorPil"),
}


@pytest.mark.parametrize("family", list(_CLASSES))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}},
        {"temporal_patch_size": 1, "merge_size": 1, "image_mean": [0.2, 0.4, 0.6], "image_std": [0.9, 0.3, 0.7]},
        {"do_normalize": False, "rescale_factor": 1 / 127},
        {"do_rescale": False, "resample": 2},
    ],
    ids=str,
)
def test_patches_are_those_of_transformers(family: str, settings: dict[str, Any]) -> None:
    """To the bit, of sizes that are kept, enlarged and made smaller; in 16 bits they are rounded once."""
    module, name = _CLASSES[family]
    settings = HALF | {"size": {"shortest_edge": 12544, "longest_edge": 100352}} | settings
    kind = transformers_class(module, name, settings)
    in_32, in_16 = (image_processor(ProcessorFiles(family, settings, {}), dtype) for dtype in ("float32", "bfloat16"))
    for width, height in ((112, 56), (30, 20), (400, 300), (1001, 37)):
        image = picture(width, height)
        want, got = kind(image, return_tensors="np"), in_32(image)
        assert tuple(want["image_grid_thw"][0]) == got.grid
        assert np.array_equal(want["pixel_values"], got.pixels)
        assert np.array_equal(in_16(image).pixels, as_type(got.pixels, "bfloat16"))


OF_V41 = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 544**2, "max_wh_ratio": None}


def v41_size(width: int, height: int, words: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of patches, written from the description: what has too few pixels grows, sides are rounded up
    to patches, and what has too many tokens shrinks to the most rows and columns of its shape."""
    patch, merge, most = words["patch_size"], words["downsample_ratio"], words["max_image_tokens"]
    if words["max_wh_ratio"] and width > height * words["max_wh_ratio"]:
        width = height * words["max_wh_ratio"]
    if width * height < words["min_pixels"]:
        ratio = math.sqrt(words["min_pixels"] / (width * height))
        width, height = int(width * ratio), int(height * ratio)
    rows, columns = -(-height // patch), -(-width // patch)
    if -(-rows // merge) * (-(-columns // merge) + 1) + 2 <= most:
        return rows, columns
    across = math.sqrt((most - 2) * width / height + 0.25) - 0.5
    down = across * height / width
    if across < 1:
        return (most - 2) // 2 * merge, merge
    if down < 1:
        return merge, (most - 3) * merge
    scale = min(int(across) * merge * patch / width, int(down) * merge * patch / height)
    return int(height * scale / patch), int(width * scale / patch)


@pytest.mark.parametrize(
    "changed", [{}, {"max_image_tokens": 40, "min_pixels": 1}, {"max_wh_ratio": 2, "downsample_ratio": 2}], ids=str
)
def test_pictures_of_deepseek_v41(changed: dict[str, Any]) -> None:
    """In the middle of their canvas, with grey beside or above and below, patches row by row; sides that are no whole
    squares, pictures that grow and that shrink, and the longest ones."""
    words = OF_V41 | changed
    in_32, in_16 = (
        image_processor(ProcessorFiles("deepseek_v41", words, {}), dtype) for dtype in ("float32", "bfloat16")
    )
    for size in ((640, 480), (100, 60), (1001, 377), (1999, 1400), (30, 3000), (3000, 20), (544, 544)):
        image = picture(*size)
        rows, columns = v41_size(*size, words)
        got, canvas = in_32(image), Image.new("RGB", (14 * columns, 14 * rows), (127, 127, 127))
        if words["max_wh_ratio"] and size[0] >= words["max_wh_ratio"] * size[1]:
            canvas = image.resize(canvas.size, Image.Resampling.BICUBIC)
        else:
            scale = min(canvas.width / size[0], canvas.height / size[1])
            inner = [
                whole if abs(side * scale - whole) < 1e-6 else round(side * scale)
                for side, whole in zip(size, canvas.size, strict=True)
            ]
            place = tuple(round((whole - side) * 0.5) for side, whole in zip(inner, canvas.size, strict=True))
            canvas.paste(image.resize(inner, Image.Resampling.BICUBIC), place)
        values = (np.asarray(canvas, np.float32) / 255 - 0.5) / 0.5
        want = values.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        assert got.grid == (1, rows, columns), size
        np.testing.assert_allclose(got.pixels, want, atol=1e-6)
        assert np.array_equal(in_16(image).pixels, as_type(want, "bfloat16"))
        merge = words["downsample_ratio"]
        assert got.num_tokens == -(-rows // merge) * (-(-columns // merge) + 1) + 2 <= words["max_image_tokens"]


OF_V4 = {
    "vision_n_layers": 32, "vision_patch_size": 14, "vision_downsample_ratio": 3, "vision_max_n_token": 384,
    "vision_min_pixels": 147456, "vision_max_wh_ratio": 8,
}  # fmt: skip


def paired(rows: int, columns: int) -> int:
    """Tokens of a picture and of the three before it, of so many patches a side: pairs of rows of squares, each with
    one more, up to a multiple of 4, between two marks."""
    down, across = -(-rows // 3), -(-columns // 3)
    inside = (down + down % 2) * (across + 1)
    return 3 + 2 + inside + (-inside) % 4


def v4_size(width: int, height: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches, written from the description: as V4.1's, with an even number of rows where a picture
    shrinks, to fewer and fewer tokens until those of its pairs are few enough."""
    width = min(width, 8 * height)
    if width * height < 147456:
        ratio = math.sqrt(147456 / (width * height))
        width, height = int(width * ratio), int(height * ratio)
    rows, columns, budget = -(-height // 14), -(-width // 14), most - 3
    while paired(rows, columns) > most:
        across = math.sqrt((budget - 2) * width / height + 0.25) - 0.5
        down = across * height / width
        if across < 1:
            rows, columns = (budget - 2) // 4 * 2 * 3, 3
        elif down < 2:
            rows, columns = 6, ((budget - 2) // 2 - 1) * 3
        else:
            scale = min(int(across) * 42 / width, int(down) // 2 * 2 * 42 / height)
            rows, columns = int(height * scale / 14), int(width * scale / 14)
        budget -= 1
    return rows, columns


def test_pictures_of_deepseek_v4_vision(tmp_path: Path) -> None:
    files = read_processor_files(tmp_path, "deepseek_v4", "{}", OF_V4)
    process = image_processor(files)
    for size in ((640, 480), (504, 420), (1400, 1000), (3000, 20), (30, 3000), (100, 4200), (4096, 4096), (147, 147)):
        got = process(picture(*size))
        rows, columns = v4_size(*size, 384)
        assert got.grid == (1, rows, columns) and got.num_tokens == paired(rows, columns) <= 384, size
        assert got.pixels.shape == (rows * columns, 588)
    for most in (16, 40):
        fewer = read_processor_files(tmp_path, "deepseek_v4", json.dumps({"image": {"max_image_tokens": most}}), OF_V4)
        for size in ((640, 480), (3000, 20), (30, 3000), (900, 100)):
            got = image_processor(fewer)(picture(*size))
            assert got.grid[1:] == v4_size(*size, most) and got.num_tokens <= most, size
    for limit in (15, 385):
        given = json.dumps({"image": {"max_image_tokens": limit}})
        with pytest.raises(UserError, match=f"max_image_tokens must be from 16 to 384 for this model; got {limit}"):
            read_processor_files(tmp_path, "deepseek_v4", given, OF_V4)
    with pytest.raises(UserError, match="language-model-only"):
        read_processor_files(tmp_path, "deepseek_v4", "{}", {"vision_n_layers": 0})


def test_limits_of_deepseek_v4_vision_are_those_of_its_config(tmp_path: Path) -> None:
    """Memory is planned for them, whatever a file says that somebody put beside the weights."""
    written = {"max_image_tokens": 1024, "size": {"shortest_edge": 1, "longest_edge": 900}, "image_mean": [0.0] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    files = read_processor_files(tmp_path, "deepseek_v4", "{}", OF_V4)
    got = image_processor(files)(picture(4096, 4096))
    assert got.grid[1:] == v4_size(4096, 4096, 384) and files.image["image_mean"] == written["image_mean"]
    with pytest.raises(UserError, match="max_image_tokens must be from 16 to 384"):
        read_processor_files(tmp_path, "deepseek_v4", '{"image": {"max_image_tokens": 385}}', OF_V4)


def test_settings_of_deepseek_v41_are_in_its_config(tmp_path: Path) -> None:
    """Published checkpoints have no files for processors; those that transformers writes have a `size` of pixels and
    tokens."""
    config = {"model_type": "deepseek_v41", "vision_config": {**OF_V41, "max_image_tokens": 50}}
    files = read_processor_files(tmp_path, "deepseek_v41", "{}", config)
    assert image_processor(files)(picture(900, 800)).num_tokens <= 50
    changed = read_processor_files(tmp_path, "deepseek_v41", '{"image": {"max_image_tokens": 20}}', config)
    assert image_processor(changed)(picture(900, 800)).num_tokens <= 20
    refused = {"max_pixels": "max_image_tokens in place", "max_image_tokens": "from 4 on"}
    for word, message in refused.items():
        given = json.dumps({"image": {word: 3}})
        with pytest.raises(UserError, match=message):
            read_processor_files(tmp_path, "deepseek_v41", given, config)
    with pytest.raises(UserError, match="language-model-only"):
        read_processor_files(tmp_path, "deepseek_v41", "{}")
    written = {"image_processor_type": "DeepseekV41ImageProcessor", "size": {"shortest_edge": 1000, "longest_edge": 30}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    files = read_processor_files(tmp_path, "deepseek_v41", "{}", config)
    assert image_processor(files)(picture(900, 800)).num_tokens <= 30


def test_a_sliver_is_refused_by_deepseek_v41() -> None:
    process = image_processor(ProcessorFiles("deepseek_v41", OF_V41 | {"min_pixels": 1, "max_image_tokens": 4}, {}))
    assert process(picture(3000, 20)).num_tokens == 4
