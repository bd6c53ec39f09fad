"""The files that are added to the target, other than the kernels."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from upstream.change import FILES, own_text
from upstream.changes import ALL
from upstream.own_files import own
from upstream.served_files import SERVED, served_module

moe_configs = own("moe_configs")
topk = own("topk")
SM120, H100 = 101_376, 232_448


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **properties: int) -> None:
    hardware = own("hardware")
    for query in (hardware.is_sm12x, hardware.use_sm120_tiles, hardware.shared_memory_limit):
        query.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(**properties))


@pytest.fixture(autouse=True)
def real_gpu_again():
    yield
    hardware = own("hardware")
    for query in (hardware.is_sm12x, hardware.use_sm120_tiles, hardware.shared_memory_limit):
        query.cache_clear()
    own("allreduce").fusion_runs_on_sm12x.cache_clear()


def test_files_stand_alone() -> None:
    """They import Python, torch, Triton and each other, all of them are used, and they run on Python 3.10."""
    used = {"__init__.py"}.union(*(change.files for change in ALL))
    assert {path.name for path in FILES.glob("*.py")} | {f"{name}.py" for name in SERVED} == used
    for file in used:
        assert own_text(file).startswith(
            "# SPDX-License-Identifier: Apache-2.0\n"
        ) and "sglang.srt.layers" not in own_text(file)
        for node in ast.walk(ast.parse(own_text(file), feature_version=(3, 10))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert (
                    top in ("torch", "triton") or top in sys.stdlib_module_names or name.startswith("sglang.srt.sm120")
                )


def test_every_change_brings_what_its_files_import() -> None:
    for change in ALL:
        for name in change.files:
            for node in ast.walk(ast.parse(own_text(name))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.sm120."):
                    assert node.module.rpartition(".")[2] + ".py" in change.files, change.name
                elif isinstance(node, ast.ImportFrom) and node.module == "sglang.srt.sm120":
                    assert {f"{alias.name}.py" for alias in node.names} <= set(change.files), change.name


@pytest.mark.parametrize("name", SERVED)
def test_files_of_the_server_differ_in_imports_alone(name: str) -> None:
    module = served_module(name)
    assert module.__file__ is not None and own(name) is module
    there = own_text(f"{name}.py").splitlines()[1:]
    for line, served in zip(there, Path(module.__file__).read_text().splitlines(), strict=True):
        assert line == served or (line.startswith("from sglang.srt.sm120") and served.startswith("from sglang.srt."))


@pytest.mark.parametrize(
    ("capability", "expected"), [((12, 0), True), ((12, 1), True), ((10, 0), False), ((9, 0), False)]
)
def test_sm12x_is_major_12(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    fake_gpu(monkeypatch, capability, shared_memory_per_block_optin=1)
    assert own("hardware").is_sm12x() is expected
    assert own("hardware").use_sm120_tiles() is expected


def test_tiles_can_be_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORCE_SM120_TILES", "1")
    fake_gpu(monkeypatch, (9, 0))
    assert own("hardware").use_sm120_tiles() and not own("hardware").is_sm12x()


def test_shared_memory_of_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (12, 1))
    assert own("hardware").shared_memory_limit() == SM120
    fake_gpu(monkeypatch, (9, 0))
    assert own("hardware").shared_memory_limit() == 0


CRASHED = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 32,
    "num_warps": 8,
    "num_stages": 4,
}


def test_the_tile_that_crashed() -> None:
    scales = 3 * 4 * 128  # which the kernel has with blockwise weights only
    assert moe_configs.needed_shared_memory(CRASHED, "fp8_w8a8") == 147_456 + scales
    fitted = moe_configs.fit(CRASHED, "fp8_w8a8", SM120)
    assert fitted == {**CRASHED, "num_stages": 3}
    assert moe_configs.needed_shared_memory(fitted, "fp8_w8a8") == 99_328  # as compiled
    assert moe_configs.fit(CRASHED, "fp8_w8a8", H100) is CRASHED
    assert moe_configs.fit(CRASHED, "fp8_w8a8", 0) is CRASHED


@pytest.mark.parametrize("dtype", ["fp8_w8a8", "int8_w8a8", "int4_w4a16", "int8_w8a16", "float32", None])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("block_n", [64, 128, 256])
@pytest.mark.parametrize("tma", [False, True])
def test_fitted_tiles_fit(dtype: str | None, stages: int, block_n: int, tma: bool) -> None:
    config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": 128, "num_stages": stages} | (
        {"USE_TMA": True} if tma else {}
    )
    fitted = moe_configs.fit(config, dtype, SM120)
    smallest = fitted["num_stages"] == 2 and fitted["BLOCK_SIZE_N"] == 64
    assert moe_configs.needed_shared_memory(fitted, dtype) <= SM120 or smallest
    assert fitted["BLOCK_SIZE_K"] == 128 and fitted["BLOCK_SIZE_M"] == 64


def test_pairs_of_configs_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_configs, "shared_memory_limit", lambda: SM120)
    assert moe_configs.fit_all((CRASHED, (None, None)), "fp8_w8a8") == ({**CRASHED, "num_stages": 3}, (None, None))
    config, (down, block_m) = moe_configs.fit_all((CRASHED, (CRASHED, 128)), "fp8_w8a8")
    assert config == down == {**CRASHED, "num_stages": 3} and block_m == 128


@pytest.mark.parametrize("tokens", [1, 160, 161, 8192])
def test_default_for_small_shared_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(moe_configs, "shared_memory_limit", lambda: SM120)
    tile = moe_configs.low_shared_memory_default(CRASHED, tokens, 160, "fp8_w8a8", None)
    assert moe_configs.needed_shared_memory(tile, "fp8_w8a8") <= SM120
    assert moe_configs.low_shared_memory_default(CRASHED, tokens, 160, "fp8_w8a8", [128, 128]) is CRASHED
    assert moe_configs.low_shared_memory_default(CRASHED, tokens, 160, None, None) is CRASHED
    monkeypatch.setattr(moe_configs, "shared_memory_limit", lambda: H100)
    assert moe_configs.low_shared_memory_default(CRASHED, tokens, 160, "fp8_w8a8", None) is CRASHED


SERVER, WORKSTATION, MAX_Q = moe_configs.EDITIONS[0]


@pytest.mark.parametrize("suffix", ["", ",dtype=fp8_w8a8", ",dtype=fp8_w8a8,block_shape=[128, 128]", "_down"])
def test_editions_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    moe_configs._find_edition.cache_clear()
    (tmp_path / "configs/triton_3_6_0").mkdir(parents=True)

    def name(device: str) -> str:
        return f"E=161,N=192,device_name={device}{suffix}.json"

    (tmp_path / "configs/triton_3_6_0" / name(MAX_Q)).touch()
    assert moe_configs.find_edition(name(WORKSTATION), "module.py") == name(MAX_Q)
    assert moe_configs.find_edition(name(MAX_Q), "module.py") == name(MAX_Q)
    assert moe_configs.find_edition(name("NVIDIA_H100"), "module.py") == name("NVIDIA_H100")
    other = name(WORKSTATION).replace("N=192", "N=384")
    assert moe_configs.find_edition(other, "module.py") == other
    moe_configs._find_edition.cache_clear()
    (tmp_path / "configs/triton_3_6_0" / name(WORKSTATION)).touch()
    assert moe_configs.find_edition(name(WORKSTATION), "module.py") == name(WORKSTATION)


def test_files_beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    (tmp_path / "configs/triton_3_4_0").mkdir(parents=True)
    (tmp_path / f"configs/triton_3_4_0/E=8,N=64,device_name={SERVER}.json").touch()
    wanted = f"E=8,N=64,device_name={WORKSTATION}.json"
    assert SERVER in moe_configs.find_edition(wanted, str(tmp_path / "module.py"))
    assert moe_configs.find_edition(wanted, "/nowhere/module.py") == wanted


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.6.12", False), ("0.6.18", True), ("0.6.18.post1", True), ("0.7.2+cu13", True), (None, False)],
)
def test_fusion_needs_a_flashinfer_that_has_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None, expected: bool
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    own("allreduce").fusion_runs_on_sm12x.cache_clear()
    fake_gpu(monkeypatch, (12, 0))
    assert own("allreduce").fusion_runs_on_sm12x() is expected
    own("allreduce").fusion_runs_on_sm12x.cache_clear()
    fake_gpu(monkeypatch, (9, 0))
    assert own("allreduce").fusion_runs_on_sm12x() is False


@pytest.mark.parametrize("newer", [False, True])
def test_strided_layouts_in_both_forms_of_triton_kernels(newer: bool) -> None:
    class Strided:
        def __init__(self, dimension: int) -> None:
            self.dimension = dimension

    default = "swizzled" if newer else ("swizzled", {})
    layout = SimpleNamespace(StridedLayout=Strided, make_default_matmul_mxfp4_w_layout=lambda mx_axis: default)
    constraints: dict[str, object] = {}
    flags = SimpleNamespace(update_opt_flags_constraints=constraints.update)
    value, value_options, scale, scale_options = own("mxfp4_layout").strided_layouts(layout, flags, 8)
    assert value is scale and value_options == scale_options == {}
    assert value.dimension == -2 if newer else value is Strided
    assert constraints == {"is_persistent": False, "num_stages": 1} | ({"num_warps": 8} if newer else {})


def chosen(row: torch.Tensor) -> set[int]:
    return {int(i) for i in row if i >= 0}


def test_topk_of_rows_of_every_length() -> None:
    score = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([50, 20, 3, 0], dtype=torch.int32)
    result = topk.fast_topk_v2(score, lengths, 8)
    assert result.dtype == torch.int32 and result.shape == (4, 8)
    for row, length in enumerate(lengths.tolist()):
        expected = set(score[row, :length].topk(min(8, length)).indices.tolist())
        assert chosen(result[row]) == expected and (result[row] < 0).sum() == 8 - len(expected)


def test_topk_counts_from_where_a_row_starts() -> None:
    score = torch.arange(30.0).repeat(2, 1)
    result = topk.fast_topk_v2(score, torch.tensor([5, 30]), 4, row_starts=torch.tensor([10, 0]))
    assert chosen(result[0]) == {1, 2, 3, 4} and chosen(result[1]) == {26, 27, 28, 29}
    wide = topk.fast_topk_v2(score, torch.tensor([5, 30]), 64)
    assert wide.shape == (2, 64) and chosen(wide[1]) == set(range(30))


def test_topk_as_cache_slots() -> None:
    score = torch.arange(6.0).repeat(3, 1)
    table = torch.tensor([[100, 101, 102, 103, 104, 105], [200, 201, 202, 203, 204, 205]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)  # two rows of the first sequence, one of the second
    result = topk.fast_topk_transform_fused(score, torch.tensor([6, 2, 4]), table, starts, 2)
    assert [chosen(row) for row in result] == [{104, 105}, {100, 101}, {202, 203}]
    decode = topk.fast_topk_transform_fused(score[:2], torch.tensor([1, 6]), table, None, 2)
    assert [chosen(row) for row in decode] == [{100}, {204, 205}] and decode.dtype == torch.int32


def test_topk_with_offsets() -> None:
    score = torch.arange(6.0).repeat(2, 1)
    result = topk.fast_topk_transform_ragged_fused(score, torch.tensor([6, 1]), torch.tensor([1000, 2000]), 2)
    assert [chosen(row) for row in result] == [{1004, 1005}, {2000}] and -1 in result[1]
