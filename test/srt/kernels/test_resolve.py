"""The rules of selection, with synthetic GPUs and a synthetic ledger."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

import sglang
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.conditions import FEW_MIN_K, FEW_MULTIPLE, MIXED_ROWS, SKINNY_MAX_ROWS, SKINNY_MIN_N
from sglang.srt.kernels.ledger_file import Ledger, Row, judged_as, tile_key
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import Choice, Need, NoKernel, Rejection
from sglang.srt.kernels.tables import EXTEND_ATTENTION, TABLES
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.triton_ops import gemv, skinny_gemm

GPUS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
SM12X = ("sm_120", "sm_121")
BOTH = frozenset({"triton", "flashinfer"})
TRITON = frozenset({"triton"})

GQA = Need("extend_attention", 128, 128)
GQA_DECODE = Need("decode_attention", 128, 128)
MLA = Need("extend_attention", 576, 512, traits=frozenset({"mla"}))
MLA_DECODE = Need("decode_attention", 576, 512, traits=frozenset({"mla"}))
HYBRID = Need("extend_attention", 256, 256, traits=frozenset({"hybrid_gdn"}))
NEEDS = (GQA, GQA_DECODE, MLA, MLA_DECODE, HYBRID)


def ledger_where_tiles_take(smem: int, needs: tuple[Need, ...] = NEEDS) -> Ledger:
    """Every candidate tile of `needs` measured at `smem` bytes on every verified architecture."""
    rows = {}
    for need in needs:
        for name in GPUS:
            arch = arch_by_name(name)
            for tile in attention_tiles(need.op, need.head_dim, need.v_head_dim, need.kv_dtype, arch.features):
                key = f"{need.head_dim}x{need.v_head_dim}/{need.q_dtype}/{need.kv_dtype}/plain"
                row = rows.setdefault((need.op, key, tile_key(tile)), Row("x"))
                row.by_target[f"3.9.0/{judged_as(arch)}"] = (smem, 100, 0, 0, ("m16n8k16 bf16",))
    return Ledger(rows)


FITS = ledger_where_tiles_take(50_000)


def reasons(choice: Choice | NoKernel) -> Mapping[str, str]:
    return {rejection.kernel: "; ".join(rejection.reasons) for rejection in choice.rejected}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_triton_serves_every_gpu(gpu: str, need: Need) -> None:
    choice = resolve(need, arch_by_name(gpu), FITS, TRITON)
    assert choice.name == "triton"
    assert choice.tile is not None and choice.record is not None and choice.record.smem == 50_000


@pytest.mark.parametrize("need", [GQA, MLA, MLA_DECODE], ids=str)
def test_cpu_takes_torch(need: Need) -> None:
    choice = resolve(need, arch_by_name("cpu"), FITS, BOTH)
    assert choice.name == "torch_native" and choice.tile is None
    assert "needs cp_async" in reasons(choice)["triton"]


@pytest.mark.parametrize("gpu", SM12X)
@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.parametrize("name", ["trtllm_mha", "trtllm_mla", "cutlass_mla", "fa4"])
def test_never_tcgen05_kernels_on_sm12x(gpu: str, need: Need, name: str) -> None:
    choice = resolve(need, arch_by_name(gpu), FITS, BOTH)
    assert f"needs tcgen05, which {gpu} does not have" in reasons(choice)[name]


@pytest.mark.parametrize("gpu", SM12X)
def test_never_trtllm_moe_on_sm12x(gpu: str) -> None:
    choice = resolve(Need("fused_moe"), arch_by_name(gpu), FITS, BOTH)
    assert choice.name == "triton"
    assert "needs tcgen05" in reasons(choice)["trtllm_gen"]
    assert "needs wgmma" in reasons(choice)["deep_gemm"]


@pytest.mark.parametrize("gpu", SM12X)
@pytest.mark.parametrize("name", ["fa3", "flashmla"])
def test_never_hopper_kernels_on_sm12x(gpu: str, name: str) -> None:
    assert "needs wgmma" in reasons(resolve(MLA, arch_by_name(gpu), FITS, BOTH))[name]


@pytest.mark.parametrize("gpu", ["sm_100", "sm_103"])
def test_tcgen05_kernels_are_out_for_another_reason_where_they_could_run(gpu: str) -> None:
    rejected = reasons(resolve(GQA, arch_by_name(gpu), FITS, BOTH))
    assert rejected["trtllm_mha"] == "not part of sm120-sglang"


@pytest.mark.parametrize("gpu", [*SM12X, "sm_90"])
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_hybrid_models_may_use_triton_or_flashinfer_on_sm12x(gpu: str, name: str) -> None:
    assert resolve(HYBRID, arch_by_name(gpu), FITS, BOTH, forced=name).name == name


@pytest.mark.parametrize("gpu", SM12X)
def test_hybrid_models_are_refused_others_on_sm12x(gpu: str) -> None:
    with pytest.raises(NoKernel, match="hybrid gated-delta-net models take triton or flashinfer") as error:
        resolve(HYBRID, arch_by_name(gpu), FITS, BOTH, forced="trtllm_mha")
    assert set(error.value.would_work) == {"triton", "flashinfer", "torch_native"}


@pytest.mark.parametrize("gpu", ["sm_100", "sm_103"])
def test_hybrid_models_may_not_use_flashinfer_with_tcgen05(gpu: str) -> None:
    with pytest.raises(NoKernel, match="hybrid gated-delta-net models take triton or trtllm_mha") as error:
        resolve(HYBRID, arch_by_name(gpu), FITS, BOTH, forced="flashinfer")
    assert "triton" in error.value.would_work
    assert resolve(GQA, arch_by_name(gpu), FITS, BOTH, forced="flashinfer").name == "flashinfer"


@pytest.mark.parametrize("gpu", SM12X)
def test_mla_stays_with_kernels_that_serve_it(gpu: str) -> None:
    choice = resolve(MLA_DECODE, arch_by_name(gpu), FITS, BOTH)
    assert choice.name in ("triton", "flashinfer_mla")
    assert "latent" in reasons(choice)["flashinfer"]


@pytest.mark.parametrize("gpu", SM12X)
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mla"])
def test_flashinfer_means_its_latent_kernels_where_attention_is_latent(gpu: str, name: str) -> None:
    arch = arch_by_name(gpu)
    assert resolve(MLA_DECODE, arch, FITS, BOTH, forced=name).name == "flashinfer_mla"
    with pytest.raises(NoKernel, match="no fp8_e4m3 cache"):
        resolve(replace(MLA_DECODE, kv_dtype="fp8_e4m3"), arch, FITS, BOTH, forced=name)
    with pytest.raises(NoKernel, match="flashinfer is not installed"):
        resolve(MLA_DECODE, arch, FITS, frozenset({"triton"}), forced=name)
    with pytest.raises(NoKernel, match=r"latents of 288 dims, 256 of them values \(has 576, 512\)"):
        resolve(replace(MLA_DECODE, head_dim=288, v_head_dim=256), arch, FITS, BOTH, forced=name)


# --- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("smem", "what"), [(106_496, "MLA 32x64"), (147_456, "fused MoE default")])
@pytest.mark.parametrize("gpu", ["sm_86", "sm_89", *SM12X])
def test_the_published_crashes_are_refused(gpu: str, smem: int, what: str) -> None:
    choice = resolve(MLA, arch_by_name(gpu), ledger_where_tiles_take(smem), TRITON)
    assert choice.name == "torch_native", what
    assert f"needs {smem:,} B of shared memory, {gpu} has 101,376 B" in reasons(choice)["triton"]


@pytest.mark.parametrize("smem", [106_496, 147_456])
def test_they_run_where_shared_memory_is_large(smem: int) -> None:
    assert resolve(MLA, arch_by_name("sm_90"), ledger_where_tiles_take(smem), TRITON).name == "triton"


def test_a_tile_outside_of_the_ledger_is_never_used() -> None:
    choice = resolve(GQA, arch_by_name("sm_120"), Ledger({}), TRITON)
    assert choice.name == "torch_native"
    assert "not in the ledger" in reasons(choice)["triton"]


def test_the_first_tile_that_fits_is_chosen_and_the_rest_is_kept() -> None:
    need, arch = GQA, arch_by_name("sm_120")
    tiles = attention_tiles(need.op, 128, 128, "bfloat16", arch.features)
    assert len(tiles) > 1
    ledger = ledger_where_tiles_take(90_000)
    first = ledger.rows[need.op, "128x128/bfloat16/bfloat16/plain", tile_key(tiles[0])]
    first.by_target["3.9.0/sm_120"] = (101_377, 100, 0, 0, ())
    choice = resolve(need, arch, ledger, TRITON)
    assert choice.tile == tiles[1] and choice.smaller_tiles == tiles[2:]


def test_an_unsupported_shape_says_so() -> None:
    choice = resolve(Need("decode_attention", 100, 100), arch_by_name("sm_120"), FITS, TRITON)
    assert choice.name == "torch_native"
    assert "no tile for head dim 100" in reasons(choice)["triton"]


@pytest.mark.parametrize("gpu", ["sm_80", "sm_86"])
def test_e4m3_caches_need_a_gpu_that_converts_it(gpu: str) -> None:
    need = Need("qk_norm_rope_store", kv_dtype="fp8_e4m3")
    choice = resolve(need, arch_by_name(gpu), FITS, TRITON)
    assert choice.name == "torch_native"
    assert reasons(choice)["triton"] == f"cannot convert fp8_e4m3 on {gpu} (fp8_e5m2 works)"
    assert resolve(replace(need, kv_dtype="fp8_e5m2"), arch_by_name(gpu), FITS, TRITON).name == "triton"
    assert resolve(need, arch_by_name("sm_120"), FITS, TRITON).name == "triton"


# --- forcing ----------------------------------------------------------------------------------------------------------


def test_a_forced_kernel_that_cannot_run_is_an_error_with_a_way_out() -> None:
    with pytest.raises(NoKernel) as error:
        resolve(GQA, arch_by_name("sm_120"), FITS, TRITON, forced="trtllm_mha")
    message = str(error.value)
    assert "trtllm_mha cannot run extend_attention (head dim 128" in message
    assert "needs tcgen05, which sm_120 does not have" in message
    assert "What would work: triton, torch_native." in message


def test_a_forced_kernel_that_does_not_exist() -> None:
    with pytest.raises(NoKernel, match="there is no such kernel; known: triton, flashinfer, torch_native"):
        resolve(GQA, arch_by_name("sm_120"), FITS, TRITON, forced="tritn")


def test_a_forced_kernel_wins_over_the_order() -> None:
    choice = resolve(GQA, arch_by_name("sm_120"), FITS, BOTH, forced="torch_native")
    assert choice.name == "torch_native" and choice.note == "asked for"
    assert reasons(choice)["triton"] == "torch_native comes first"


def test_weight_only_is_not_taken_where_fp4_is_native() -> None:
    need = Need("fused_moe", quant="nvfp4")
    for gpu, native in (("sm_120", True), ("sm_90", False)):
        choice = resolve(need, arch_by_name(gpu), FITS, BOTH)
        assert choice.name == "triton"
        assert ("native FP4 is available" in reasons(choice)["marlin"]) is native
        assert ("widened" in choice.remark) is not native


def test_experts_of_every_scheme_have_a_kernel_or_a_reason() -> None:
    for name, scheme in SCHEMES.items():
        need = Need("fused_moe", quant=name)
        assert resolve(need, arch_by_name("sm_120"), FITS, BOTH).name == "triton"
        # No e4m3 on sm_80, neither as weights nor as scales.
        choice = resolve(need, arch_by_name("sm_80"), FITS, BOTH)
        assert (choice.name == "triton") is ("e4m3" not in (scheme.element, scheme.scale))
        assert choice.name == "triton" or "no e4m3 arithmetic" in reasons(choice)["triton"]


def test_norms_over_all_heads_are_an_op_of_their_own() -> None:
    """Those of single heads are part of the rotation's kernel."""
    arch = arch_by_name("sm_120")
    rotation = Need("qk_norm_rope_store", 128, 128, traits=frozenset({"head_norm"}), heads=(6, 1), rotary_dim=64)
    assert resolve(rotation, arch, FITS, BOTH).name == "triton"
    assert resolve(Need("qk_whole_norm"), arch, FITS, BOTH).name == "triton"


def test_products_of_16_bit_weights_say_what_serves_them() -> None:
    shapes = ((4096, 1024, False), (7168, 256, False), (64, 840, False), (512, 2880, True))
    assert resolve(Need("linear", shapes=shapes), arch_by_name("sm_120"), FITS, BOTH).remark == (
        "cublas for steps of more than 16 tokens, and for all with K below 512 or no multiple of 16: 7168x256, 64x840;"
        " gemv_kernel for one token, skinny_gemm_kernel for more, which read the weight once and begin with it ahead of"
        " x: 4096x1024; gemv_kernel for one token, else cublas, with N below 2048: 512x2880 + bias"
    )
    assert (gemv.MIN_K, gemv.ROW_MULTIPLE) == (FEW_MIN_K, FEW_MULTIPLE)
    assert (skinny_gemm.MIN_K, skinny_gemm.ROW_MULTIPLE) == (FEW_MIN_K, FEW_MULTIPLE)
    assert (skinny_gemm.MIN_COLS, skinny_gemm.MAX_ROWS) == (SKINNY_MIN_N, SKINNY_MAX_ROWS)


def test_mixed_four_and_eight_bits_are_widened() -> None:
    choice = resolve(Need("fused_moe", quant="mxfp4_mxfp8"), arch_by_name("sm_120"), FITS, BOTH)
    assert (choice.name, choice.remark) == ("triton", "weights widened to e4m3 in registers")
    assert Rejection("sgl_kernel", ("sm120_sgl_kernel is not installed",)) in choice.rejected


@pytest.mark.parametrize("arch", ["sm_120", "sm_121"])
def test_mixed_products_serve_where_sgl_kernel_is_installed(arch: str) -> None:
    installed = BOTH | {"sm120_sgl_kernel"}
    choice = resolve(Need("fused_moe", quant="mxfp4_mxfp8"), arch_by_name(arch), FITS, installed)
    assert choice.name == "sgl_kernel" and Rejection("triton", ("sgl_kernel comes first",)) in choice.rejected
    assert choice.remark == (
        f"e2m1 times e4m3 as they are, from {MIXED_ROWS} pairs an expert on; for fewer by triton, weights"
        " widened to e4m3 in registers"
    )
    for quant in (None, "mxfp4", "mxfp8", "nvfp4"):
        assert resolve(Need("fused_moe", quant=quant), arch_by_name(arch), FITS, installed).name == "triton"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_mixed_products_are_of_sm_120(arch: str) -> None:
    """sm_100 has block scales too, but not in `mma.sync`."""
    installed = BOTH | {"sm120_sgl_kernel"}
    choice = resolve(Need("fused_moe", quant="mxfp4_mxfp8"), arch_by_name(arch), FITS, installed)
    reason = choice.rejected[0].reasons[0]
    assert choice.name == "triton" and choice.rejected[0].kernel == "sgl_kernel" and "mma_sync_block_scale" in reason


# --- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", TABLES)
def test_every_usable_row_can_be_loaded_where_its_packages_are(op: str) -> None:
    for spec in TABLES[op]:
        if spec.not_here is not None or spec.package not in (None, "triton"):
            continue
        loaded = Choice(Need(op), spec).load()
        functions = [getattr(loaded, part.name) for part in fields(loaded)] if is_dataclass(loaded) else [loaded]
        assert all(map(callable, functions)), spec.name


def test_attention_backends_are_the_names_users_know() -> None:
    assert {"triton", "flashinfer", "torch_native"} <= {spec.name for spec in EXTEND_ATTENTION}


def test_nobody_compares_architectures_or_asks_the_device() -> None:
    """Only hardware/ asks the device; nothing is called is_blackwell."""
    root = Path(sglang.__file__).parent
    forbidden = {"get_device_capability", "get_device_properties", "is_blackwell", "mem_get_info"}
    for path in root.rglob("*.py"):
        if path.parent.name == "hardware":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in forbidden, f"{path}:{getattr(node, 'lineno', 0)} uses {name}"
