from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.hardware import arch as arch_module
from sglang.srt.hardware.arch import CPU, UnknownArch, arch_by_name, current_arch, free_memory_bytes, is_sm120_supported
from sglang.srt.hardware.products import ARCHS, FAMILY_NAMES, FEATURES, PRODUCTS, product_of_device_name

EXPECTED_FEATURES = {
    "sm_80": {"cp_async", "nvlink"},
    "sm_86": {"cp_async"},
    "sm_89": {"cp_async", "fp8_mma"},
    "sm_90": {"cp_async", "fp8_mma", "tma", "wgmma", "pdl", "nvlink"},
    "sm_100": {"cp_async", "fp8_mma", "tma", "tcgen05", "block_scaled_mma", "pdl", "nvlink"},
    "sm_103": {"cp_async", "fp8_mma", "tma", "tcgen05", "block_scaled_mma", "pdl", "nvlink"},
    "sm_120": {"cp_async", "fp8_mma", "tma", "block_scaled_mma", "mma_sync_block_scale", "pdl"},
    "sm_121": {"cp_async", "fp8_mma", "tma", "block_scaled_mma", "mma_sync_block_scale", "pdl"},
    "cpu": set(),
}


@pytest.mark.parametrize("name", EXPECTED_FEATURES)
def test_features(name: str) -> None:
    arch = arch_by_name(name)
    assert arch.name == name
    assert arch.features == EXPECTED_FEATURES[name]
    assert arch.features <= FEATURES
    assert arch.device == ("cpu" if name == "cpu" else "cuda")


@pytest.mark.parametrize("name", ["sm_86", "sm_89", "sm_120", "sm_121"])
def test_the_small_shared_memory(name: str) -> None:
    assert arch_by_name(name).smem_per_block == 101_376


@pytest.mark.parametrize("name", ["sm_90", "sm_100", "sm_103"])
def test_the_large_shared_memory(name: str) -> None:
    assert arch_by_name(name).smem_per_block == 232_448


@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product: str) -> None:
    arch = arch_by_name(product)
    assert arch.product == product and arch.name in ARCHS
    assert arch.num_sms > 0 and arch.memory > 0 and arch.bandwidth > 0


@pytest.mark.parametrize(
    ("device_name", "product"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max-q"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 5080", "rtx-5080"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtx-pro-5000"),
        ("NVIDIA RTX PRO 5000 72GB Blackwell", "rtx-pro-5000-72gb"),
        ("NVIDIA RTX PRO 4500 Blackwell", "rtx-pro-4500"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx-5060-ti"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Some future card", None),
    ],
)
def test_product_of_device_name(device_name: str, product: str | None) -> None:
    assert product_of_device_name(device_name) == product


def test_a_gb10_is_a_machine_of_one_gpu_whose_memory_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    spark, chip, card = map(arch_by_name, ("dgx-spark", "sm_121", "rtx-5090"))
    assert (spark.gpus_per_machine, spark.unified_memory) == (1, True)
    assert (chip.gpus_per_machine, chip.unified_memory) == (0, True), "no other machine has this chip"
    assert (card.gpus_per_machine, card.unified_memory) == (0, False)
    import torch

    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (40 * gib, 121 * gib))
    monkeypatch.setattr(arch_module, "free_main_memory", lambda: 100 * gib)
    assert arch_module.free_memory_bytes(0) == 40 * gib
    assert arch_module.free_memory_bytes(0, unified=True) == 100 * gib, "the page cache gives way"
    monkeypatch.setattr(arch_module, "free_main_memory", lambda: 500 * gib)
    assert arch_module.free_memory_bytes(0, unified=True) == 121 * gib


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownArch, match=r"'sm_999'.*sm_120.*rtx-5090"):
        arch_by_name("sm_999")


def test_force_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_120")
    assert current_arch().name == "sm_120"
    assert is_sm120_supported()
    assert current_arch(device="cpu") is CPU
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_121")
    assert is_sm120_supported()
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_100")
    assert not is_sm120_supported()
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "geforce 256")
    with pytest.raises(UnknownArch, match="geforce 256"):
        current_arch()


@pytest.mark.parametrize(("triton", "native"), [((3, 6), False), ((3, 7), False), ((3, 8), True), (None, True)])
def test_an_old_triton_takes_features_away(
    monkeypatch: pytest.MonkeyPatch, triton: tuple[int, int] | None, native: bool
) -> None:
    monkeypatch.setattr(arch_module, "triton_version", lambda: triton)
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_121")
    assert ("block_scaled_mma" in current_arch().features) == native
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_120")
    assert "block_scaled_mma" in current_arch().features


def test_a_forced_architecture_keeps_to_what_the_gpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_120")
    monkeypatch.setattr(arch_module, "cuda_available", lambda: True)
    monkeypatch.setattr(arch_module, "_measured_arch", lambda index: arch_by_name("h200"))
    forced = current_arch()
    assert forced.name == "sm_120" and forced.smem_per_block == 101_376
    assert forced.features == EXPECTED_FEATURES["sm_120"] - {"block_scaled_mma", "mma_sync_block_scale"}


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_FORCE_ARCH", raising=False)
    monkeypatch.setattr(arch_module, "cuda_available", lambda: False)
    assert current_arch() is CPU
    with pytest.raises(ValueError, match="--device cuda"):
        current_arch(device="cuda")


@pytest.mark.parametrize(
    ("capability", "like"), [((8, 7), "sm_86"), ((9, 5), "sm_90"), ((10, 1), "sm_100"), ((12, 9), "sm_121")]
)
def test_unlisted_capability_gets_what_an_older_one_guarantees(capability: tuple[int, int], like: str) -> None:
    assert arch_module._facts_for(capability).features == ARCHS[like].features


def test_unlisted_major_gets_the_minimum() -> None:
    assert arch_module._facts_for((11, 0)).features == {"cp_async"}
    assert arch_module._facts_for((7, 5)).features == frozenset()


def test_free_main_memory() -> None:
    assert 64 * 2**20 < free_memory_bytes(None) < 2**50


@pytest.mark.parametrize(
    ("limit", "used", "files", "free"),
    [(None, 0, 0, 200), ("max", 0, 0, 200), (100, 90, 70, 80), (100, 120, 0, 0), (300, 1, 0, 200)],
)
def test_the_limit_of_a_container_counts(
    limit: int | str | None, used: int, files: int, free: int, tmp_path: Path
) -> None:
    """In GiB. Files that the container has read give way."""
    gib = 1 << 30
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {200 << 20} kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    if limit is not None:
        (group / "memory.max").write_text(f"{limit if limit == 'max' else int(limit) * gib}\n")
        (group / "memory.current").write_text(f"{used * gib}\n")
        (group / "memory.stat").write_text(
            f"anon 1\nactive_file {files * gib // 2}\ninactive_file {files * gib // 2}\n"
        )
    assert arch_module.free_main_memory(tmp_path) == free * gib


def test_export_for_ported_code() -> None:
    from sglang.srt import utils

    assert utils.is_sm120_supported is is_sm120_supported


@pytest.mark.parametrize(
    ("typed", "name"),
    [("RTX 5090", "rtx-5090"), ("rtx5090", "rtx-5090"), ("RTX_PRO_6000", "rtx-pro-6000"), ("sm120", "sm_120")],
)
def test_names_may_be_typed_otherwise(typed: str, name: str) -> None:
    assert arch_by_name(typed) == arch_by_name(name)


def test_no_two_names_are_typed_alike() -> None:
    names = ["cpu", *ARCHS, *FAMILY_NAMES, *PRODUCTS]
    assert all(arch_by_name(name) == arch_by_name(name.upper()) for name in names)
