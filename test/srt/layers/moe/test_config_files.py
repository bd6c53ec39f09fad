"""Tuning files: names, contents, which one is found, and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.spec import Need, TileRecord
from sglang.srt.kernels.tile_configs import ANY
from sglang.srt.layers.moe.fused_moe_triton import capacity, config_files
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile
from sglang.srt.layers.moe.fused_moe_triton.config_files import Found, find
from sglang.srt.layers.moe.fused_moe_triton.config_format import (
    ConfigFileError,
    Content,
    TilePair,
    nearest,
    read_content,
)
from sglang.srt.layers.moe.fused_moe_triton.config_names import parse_name
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import triton_tile_configs
from sglang.tuning import tile_files
from sglang.tuning.tile_files import write_content

SERVER = arch_by_name("rtx-pro-6000-server")
ENTRY = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


def fits(product: ProductTile, arch: ArchTraits) -> TileRecord:
    """Two bytes an element and one stage less than asked for, as the bf16 kernel takes."""
    tile, width = product.tile, 2 if product.kind == "gate_up" else 1
    elements = (tile["BLOCK_M"] + width * tile["BLOCK_N"]) * tile["BLOCK_K"]
    return TileRecord(2 * elements * max(1, tile["num_stages"] - 1), 128, 0, 0, ("m16n8k16 bf16",))


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `configs` directory that is searched alone."""
    monkeypatch.setattr(config_files, "PACKAGE_CONFIGS", tmp_path / "none")
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    (tmp_path / "configs").mkdir()
    return tmp_path / "configs"


def put(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def search(arch: ArchTraits = SERVER, scheme: str | None = None, experts: int = 128, hidden: int = 2048) -> Found:
    return find(experts, 768, scheme, arch, hidden=hidden, cost=fits)


# --- names ------------------------------------------------------------------------------------------------------------

UPSTREAM_NAMES = (
    "E=128,N=192,device_name=NVIDIA_A800-SXM4-80GB.json",
    "E=161,N=384,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition,dtype=fp8_w8a8.json",
    "E=256,N=256,device_name=NVIDIA_H20-3e,dtype=fp8_w8a8,block_shape=[128, 128]_down.json",
    "E=384,N=256,device_name=AMD_Instinct_MI350X,dtype=int4_w4a16_down.json",
    "E=264,N=128,device_name=NVIDIA_A800-SXM4-80GB,dtype=int8_w8a8,per_channel_quant=True.json",
)


@pytest.mark.parametrize("name", UPSTREAM_NAMES)
def test_names_of_upstream_survive_a_round_trip(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert str(parsed) == name


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_own_names_survive_a_round_trip(scheme: str | None) -> None:
    name = tile_files.own_name(161, 192, 5120, scheme, SERVER)
    assert parse_name(str(name)) == name
    assert name.scheme_rank(scheme) == 0
    others = {None, *SCHEMES} - {scheme}
    assert all(name.scheme_rank(other) is None for other in others)


@pytest.mark.parametrize("name", ["README.md", "moe_sum_reduce_NVIDIA-H200_t8_h2048_bfloat16.json", "E=1.json"])
def test_other_files_are_not_tuning_files(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (None, "E=8,N=64,device_name=NVIDIA_H200.json"),
        ("fp8_tensor", "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"),
        ("fp8_channel", "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json"),
        ("fp8_block", "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"),
        ("int4_g32", "E=8,N=64,device_name=NVIDIA_H200,dtype=int4_w4a16.json"),
        ("nvfp4", "E=8,N=64,device_name=NVIDIA_H200,dtype=nvfp4.json"),
    ],
)
def test_upstream_names_of_the_schemes(scheme: str | None, name: str) -> None:
    assert str(tile_files.upstream_name(8, 64, scheme, "NVIDIA H200")) == name


# --- which GPU --------------------------------------------------------------------------------------------------------

DEVICES = {
    "rtx-pro-6000-server": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "rtx-pro-6000-workstation": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "rtx-pro-6000-max-q": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "rtx-5090": "NVIDIA GeForce RTX 5090",
    "gb10": "NVIDIA GB10",
}
EDITIONS = tuple(key for key in DEVICES if key.startswith("rtx-pro-6000"))


@pytest.mark.parametrize("tuned_on", DEVICES)
@pytest.mark.parametrize("runs_on", DEVICES)
def test_editions_of_a_card_share_files(configs: Path, tuned_on: str, runs_on: str) -> None:
    put(configs / str(tile_files.upstream_name(128, 768, None, DEVICES[tuned_on])), {"1": ENTRY})
    same_card = tuned_on == runs_on or (tuned_on in EDITIONS and runs_on in EDITIONS)
    assert (search(arch_by_name(runs_on)).tiles is not None) == same_card


@pytest.mark.parametrize(("arch", "sms"), [("sm_120", 188), ("sm_120", 170), ("sm_121", 48)])
@pytest.mark.parametrize("runs_on", DEVICES)
def test_own_files_are_found_by_architecture_and_sm_count(configs: Path, arch: str, sms: int, runs_on: str) -> None:
    put(configs / f"E=128,N=768,arch={arch},sms={sms}.json", {"1": ENTRY})
    traits = arch_by_name(runs_on)
    assert (search(traits).tiles is not None) == ((traits.name, traits.num_sms) == (arch, sms))


def test_the_better_placed_file_wins(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: this product, another edition, the architecture; then the hidden size; then the Triton version."""
    monkeypatch.setattr(config_files.importlib.metadata, "version", lambda name: "3.6.0")
    own = "E=128,N=768,H={},arch=sm_120,sms=188.json"
    server = "E=128,N=768,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
    max_q = "E=128,N=768,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition.json"
    order = [
        configs / "triton_3_1_0" / server,
        configs / "triton_3_6_0" / max_q,
        configs / "triton_3_6_0" / own.format(2048),
        configs / "triton_3_5_1" / own.format(2048),
        configs / "triton_3_9_0" / own.format(2048),
        configs / own.format(2048),
        configs / "triton_3_6_0" / own.format(4096),
    ]
    for path in reversed(order):
        put(path, {"1": ENTRY})
    for path in order:
        found = search().tiles
        assert found is not None and found.path == path
        path.unlink()
    assert search().tiles is None


def test_the_users_directory_comes_before_the_package(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "E=128,N=768,H=2048,arch=sm_120,sms=188.json"
    shipped = put(configs.parent / "shipped" / name, {"1": ENTRY})
    monkeypatch.setattr(config_files, "PACKAGE_CONFIGS", shipped.parent)
    assert search().tiles.path == shipped  # type: ignore[union-attr]
    own = put(configs / "triton_3_1_0" / name, {"1": ENTRY})
    assert search().tiles.path == own  # type: ignore[union-attr]


def test_schemes_do_not_take_each_others_files(configs: Path) -> None:
    per_channel = "E=128,N=768,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition,dtype=fp8_w8a8"
    put(configs / f"{per_channel}.json", {"1": ENTRY})
    assert search(scheme="fp8_tensor").tiles is not None
    assert search(scheme="fp8_channel").tiles is not None  # upstream leaves the suffix out for some checkpoints
    for scheme in (None, "fp8_block", "int4_g32", "nvfp4"):
        assert search(scheme=scheme).tiles is None
    best = put(configs / f"{per_channel},per_channel_quant=True.json", {"1": ENTRY})
    assert search(scheme="fp8_channel").tiles.path == best  # type: ignore[union-attr]


# --- contents ---------------------------------------------------------------------------------------------------------


def test_upstream_counts_gate_and_up_rows(configs: Path) -> None:
    put(configs / "E=128,N=768,arch=sm_120,sms=188.json", {"1": ENTRY})
    pair = search().tiles.at(1)  # type: ignore[union-attr]
    shared = {"BLOCK_M": 16, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 3}
    assert pair.gate_up == shared | {"BLOCK_N": 32}
    assert pair.down == shared | {"BLOCK_N": 64}


def test_the_companion_file_has_the_tiles_of_the_down_projection(configs: Path) -> None:
    """BLOCK_M stays that of gate and up: both products share one grouping."""
    name = "E=128,N=768,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"
    put(configs / f"{name}.json", {"1": ENTRY, "64": ENTRY | {"BLOCK_SIZE_M": 32}})
    put(configs / f"{name}_down.json", {"1": ENTRY, "48": ENTRY | {"BLOCK_SIZE_N": 128, "USE_TMA": False}})
    tuned = search().tiles
    assert tuned is not None
    assert tuned.at(1).down["BLOCK_N"] == 64
    assert tuned.at(64).down | {"BLOCK_N": 0} == tuned.at(64).gate_up | {"BLOCK_N": 0}
    assert tuned.at(64).down["BLOCK_N"] == 128


def test_a_file_survives_a_round_trip(tmp_path: Path) -> None:
    up = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 3}
    about = {"source": "model", "arch": "sm_120", "num_sms": 188, "scheme": "none"}
    wide = up | {"BLOCK_N": 128, "num_warps": 8}
    pairs = {1: TilePair(up, up | {"BLOCK_N": 64}), 64: TilePair(up, wide)}
    content = Content(about, pairs)
    write_content(tmp_path / "x.json", content)
    assert read_content(tmp_path / "x.json") == content
    written = json.loads((tmp_path / "x.json").read_text())
    assert "down" not in written["1"]  # the usual relation of the two needs no second tile
    assert set(written["64"]) == {*ENTRY, "down"}


@pytest.mark.parametrize(
    ("tokens", "key"), [(1, 1), (0, 1), (5, 4), (6, 4), (7, 8), (12, 8), (13, 16), (1000, 64), (40, 16), (41, 64)]
)
def test_nearest_number_of_tokens(tokens: int, key: int) -> None:
    """Of two equally close ones the smaller."""
    assert nearest({64: 0, 1: 0, 16: 0, 4: 0, 8: 0}, tokens) == key


# --- refused ----------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "": "cannot be read as JSON",
    '{"1": ': "cannot be read as JSON",
    "[]": "holds a JSON list",
    "{}": "no entry for any number of tokens",
    json.dumps({"source": "model"}): "no entry for any number of tokens",
    json.dumps({"source": "guess", "1": ENTRY}): "source is 'guess'",
    json.dumps({"layers": 3, "1": ENTRY}): "unknown key 'layers'",
    json.dumps({"1": 5}): "entry 1 is not an object",
    json.dumps({"1": ENTRY | {"waves_per_eu": 0}}): "entry 1 has the unknown key 'waves_per_eu'",
    json.dumps({"1": {k: v for k, v in ENTRY.items() if k != "num_stages"}}): "entry 1 has no num_stages",
    json.dumps({"1": ENTRY | {"BLOCK_SIZE_N": "64"}}): "BLOCK_SIZE_N is '64'",
    json.dumps({"1": ENTRY | {"BLOCK_SIZE_K": 96}}): "BLOCK_SIZE_K is 96, not a power of two",
    json.dumps({"1": ENTRY | {"BLOCK_SIZE_M": 8}}): "BLOCK_SIZE_M is 8",
    json.dumps({"1": ENTRY | {"num_warps": True}}): "num_warps is True",
    json.dumps({"1": ENTRY | {"num_stages": 99}}): "num_stages is 99",
    json.dumps({"1": ENTRY | {"SPLIT_K": 4}}): "SPLIT_K is 4",
    json.dumps({"1": ENTRY | {"down": 3}}): "down is not an object",
    json.dumps({"source": "model", "arch": "sm_90", "1": ENTRY}): "says arch 'sm_90', but its name stands for 'sm_120'",
    json.dumps({"source": "model", "scheme": "nvfp4", "1": ENTRY}): "stands for 'none'",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_corrupt_or_foreign_file_is_an_error_that_names_it(configs: Path, text: str) -> None:
    path = put(configs / "E=128,N=768,arch=sm_120,sms=188.json", text)
    with pytest.raises(ConfigFileError) as caught:
        search()
    assert str(path) in str(caught.value)
    assert BAD_FILES[text] in str(caught.value)
    assert "elete" in str(caught.value)  # what to do


def test_a_corrupt_companion_file_is_an_error(configs: Path) -> None:
    put(configs / "E=128,N=768,arch=sm_120,sms=188.json", {"1": ENTRY})
    put(configs / "E=128,N=768,arch=sm_120,sms=188_down.json", {"1": ENTRY, "x": 1})
    with pytest.raises(ConfigFileError, match="unknown key 'x'"):
        search()


PUBLISHED = ENTRY | {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "num_stages": 4}
"""The default of which servers on this hardware died: 147,456 B of shared memory."""


def test_the_published_tile_is_rejected_on_sm_120_and_accepted_on_sm_90(configs: Path) -> None:
    put(configs / "E=128,N=768,arch=sm_120,sms=188.json", {"1": ENTRY, "512": PUBLISHED})
    put(configs / "E=128,N=768,arch=sm_90,sms=132.json", {"1": ENTRY, "512": PUBLISHED})
    found = search()
    assert found.tiles is None
    (reason,) = found.rejected
    assert "entry 512: gate_up tile" in reason
    assert "needs 147,456 B of shared memory, sm_120 has 101,376 B" in reason
    hopper = search(arch_by_name("h200"))
    assert hopper.tiles is not None and not hopper.rejected
    assert hopper.tiles.smem == 147_456


def test_after_a_rejected_file_the_next_one_is_used(configs: Path) -> None:
    put(configs / "triton_3_6_0/E=128,N=768,H=2048,arch=sm_120,sms=188.json", {"1": PUBLISHED})
    good = put(configs / "E=128,N=768,arch=sm_120,sms=188.json", {"1": ENTRY})
    found = search()
    assert found.tiles is not None and found.tiles.path == good
    assert len(found.rejected) == 1
    assert "rejected" in found.describe() and good.name in found.describe()


def test_a_file_whose_tiles_are_on_no_record_says_so(configs: Path) -> None:
    put(configs / "E=128,N=768,arch=sm_120,sms=188.json", {"1": ENTRY})
    found = find(128, 768, None, SERVER, hidden=2048, cost=lambda product, arch: None)
    assert found.tiles is not None and found.tiles.unmeasured == 2
    assert "2 tiles not on record, which step down if they do not fit" in found.describe()


def test_a_file_for_another_hidden_size_says_so(configs: Path) -> None:
    put(configs / "E=128,N=768,H=4096,arch=sm_120,sms=188.json", {"1": ENTRY})
    found = search()
    assert found.tiles is not None and found.tiles.other_hidden == 4096
    assert "made for hidden size 4096" in found.describe()


def test_the_bands_say_what_was_rejected(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_shipped_cost", lambda variant, tile, arch: TileRecord(147_456, 255, 0, 0, ()))
    put(configs / "E=128,N=768,arch=sm_120,sms=188.json", {"1": PUBLISHED})
    need = Need("fused_moe", shapes=((1536, 2048, False), (2048, 768, False)), experts=(128, 8, 1))
    cut = triton_tile_configs(need, SERVER)
    (warning,) = cut.warnings
    assert warning.startswith("MoE tuning file not used") and "147,456 B" in warning
    assert "no tuning file" in cut.source and "rejected" in cut.source


def test_a_step_gets_the_entry_of_the_closest_number_of_tokens(configs: Path) -> None:
    """Few pairs are not grouped, and take none. With two groups of ranks entries are of the tokens of one."""
    put(configs / "E=8,N=64,arch=sm_120,sms=188.json", {"9": ENTRY, "64": ENTRY | {"num_stages": 4}})
    for groups in (1, 2):
        need = Need("fused_moe", shapes=((128, 2048, False), (2048, 64, False)), experts=(8, 2, groups))
        few, first, last = triton_tile_configs(need, SERVER).by_shape[None]
        assert (few.max_tokens, few.variant) == (groups, "few pairs")
        assert (first.max_tokens, first.tiles[0]["num_stages"]) == (36 * groups, 3)
        assert (last.max_tokens, last.tiles[0]["num_stages"]) == (ANY, 4)
        assert all(config.why == "E=8,N=64,arch=sm_120,sms=188.json" for config in (first, last))


def test_an_unknown_shape_has_no_file(configs: Path) -> None:
    found = search(experts=127)
    assert found == Found(None, ())
    assert "no tuning file" in found.describe()


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_g64"])
def test_a_name_that_stands_for_weights_of_other_groups_too(scheme: str) -> None:
    """Of a file of ours, for experts whose weights have groups of 32."""
    found = find(384, 256, scheme, arch_by_name("h200"), hidden=7168, cost=fits)
    assert (found.tiles is not None) == (scheme == "int4_g32")
    assert scheme == "int4_g32" or "its tiles are for int4_g32" in found.describe()
