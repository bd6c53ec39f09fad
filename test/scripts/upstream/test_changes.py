"""Every change on a small tree: applied, applied before, done upstream, moved, absent; and all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import upstream_trees as synthetic
from upstream.change import Change, FailedCheck, NotApplicable, Outcome, apply, mark
from upstream.changes import ALL
from upstream.own_files import own
from upstream.tree import Tree
from upstream_trees import ATTENTION, EXTEND, FILES, MOE, OPS

NAMES = [change.name for change in ALL]
OWN = "sglang/srt/sm120/"


@pytest.mark.parametrize("name", NAMES)
def test_applied_then_already_applied(tmp_path: Path, name: str) -> None:
    root = synthetic.write(tmp_path)
    before = synthetic.snapshot(root)
    first = synthetic.outcome(root, name)
    assert (first.outcome, first.detail) == (Outcome.APPLIED, "")
    after = synthetic.snapshot(root)
    assert {path for path in after if after[path] != before.get(path)} == set(first.changed)
    for path in first.changed:
        compile(after[path], path, "exec")
        assert path.startswith(OWN) or f"({name}): see NOTICE.sm120." in after[path].decode().splitlines()[0]

    second = synthetic.outcome(root, name)
    assert second.outcome is Outcome.ALREADY_APPLIED
    assert synthetic.snapshot(root) == after


def test_all_together(tmp_path: Path) -> None:
    root = synthetic.write(tmp_path)
    assert set(synthetic.outcomes(root).values()) == {Outcome.APPLIED}
    assert (root / "sglang/srt/untouched.py").read_text() == FILES["sglang/srt/untouched.py"]
    again = synthetic.snapshot(root)
    assert set(synthetic.outcomes(root).values()) == {Outcome.ALREADY_APPLIED}
    assert synthetic.snapshot(root) == again


def test_names_are_unique_and_every_change_says_what_for() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for change in ALL:
        assert change.title and change.why.endswith(".") and not change.merged.endswith(".")


EXTEND_PATH = f"{OPS}/extend_attention.py"
PREFILL_PATH = f"{OPS}/prefill_attention.py"
REGISTRY_PATH = f"{ATTENTION}/attention_registry.py"
BACKEND_PATH = f"{ATTENTION}/nsa_backend.py"
INDEXER_PATH = f"{ATTENTION}/nsa/nsa_indexer.py"
ARGUMENTS_PATH = "sglang/srt/server_args.py"
COMMUNICATOR_PATH = "sglang/srt/layers/communicator.py"
MXFP4_PATH = "sglang/srt/layers/quantization/mxfp4.py"
FP8_PATH = "sglang/srt/layers/quantization/fp8.py"
INKLING_PATH = "sglang/kernels/ops/moe/inkling_moe.py"
FUSION_PATH = "sglang/srt/layers/flashinfer_comm_fusion.py"
OVERRIDES_PATH = "sglang/srt/arg_groups/overrides.py"
HOOK_PATH = "sglang/srt/arg_groups/deepseek_v4_hook.py"

MANGLED = (
    (
        "extend-tiles",
        EXTEND_PATH,
        "_get_block_sizes_for_extend_attention",
        "_get_block_size_for_extend",
        "_get_block_size_for_extend",
    ),
    ("extend-tiles", EXTEND_PATH, "(Lq, Lv):", "(head_dim):", "head_dim"),
    ("extend-tiles", EXTEND_PATH, "    return BLOCK_DMODEL", "    yield BLOCK_DMODEL", "no longer works"),
    ("tree-mask-tiles", EXTEND_PATH, "extend_attention_fwd", "extend_attention_forward", "extend_attention_forward"),
    ("tree-mask-tiles", EXTEND_PATH, "custom_mask", "mask", "no longer takes custom_mask"),
    ("tree-mask-tiles", EXTEND_PATH, "BLOCK_M", "ROWS", "no longer"),
    ("prefill-tiles", PREFILL_PATH, "context_attention_fwd", "context_attention_forward", "context_attention_forward"),
    ("prefill-tiles", PREFILL_PATH, "max_input_len", "max_len", "max_len"),
    ("hybrid-backends", REGISTRY_PATH, "attn_backend_wrapper", "wrap_attn_backend", ""),
    ("hybrid-backends", REGISTRY_PATH, '"trtllm_mha"', '"cutlass"', "expected form"),
    ("default-backend", ARGUMENTS_PATH, "class ServerArgs", "class Arguments", "nearest"),
    ("trtllm-mla-prefill", ARGUMENTS_PATH, '"trtllm_mla"', '"trt_mla"', "no longer checks"),
    ("dsa-backends", ARGUMENTS_PATH, "major >= 10", "major > 9", "expected form"),
    ("dsa-backends", ARGUMENTS_PATH, "kv_cache_dtype, major", "kv_cache_dtype, sm", "it takes"),
    ("dsa-indexer", BACKEND_PATH, "import deep_gemm", "import deep_gemm_next as deep_gemm", "deep_gemm"),
    ("dsa-indexer", INDEXER_PATH, "_with_real_sm_count", "_with_sm_count", "_with_real_sm_count is not defined"),
    ("dsa-topk", BACKEND_PATH, "from sgl_kernel import", "from sglang_kernel import", "fast_topk_v2"),
    ("dsa-attention", BACKEND_PATH, "_forward_flashmla_kv", "_forward_kv", "_forward_flashmla_kv is not defined"),
    ("dsa-attention", BACKEND_PATH, "sgl_kernel.flash_mla", "sglang_flash_mla", "FlashMLA"),
    (
        "v4-arguments",
        HOOK_PATH,
        "apply_deepseek_v4_defaults",
        "apply_deepseek_v4_default",
        "apply_deepseek_v4_default (",
    ),
    ("v4-indexer", f"{ATTENTION}/dsv4/metadata.py", "deep_gemm", "deeper_gemm", "deep_gemm"),
    (
        "v4-attention",
        f"{ATTENTION}/deepseek_v4_backend.py",
        "import flash_mla",
        "import flash_mla_next as flash_mla",
        "flash_mla",
    ),
    (
        "allreduce-fusion",
        COMMUNICATOR_PATH,
        "apply_flashinfer_allreduce_fusion",
        "flashinfer_fusion_applies",
        "nearest",
    ),
    (
        "allreduce-fusion",
        FUSION_PATH,
        "is_sm90_supported() or is_sm100_supported()",
        "fusion_supported()",
        "expected form",
    ),
    ("mxfp4-layout", MXFP4_PATH, "_swizzle_mxfp4", "_swizzle_mxfp4_weights", "_swizzle_mxfp4_weights"),
    ("mxfp4-layout", MXFP4_PATH, "scale_layout_opts", "scale_options", "scale_layout_opts"),
    ("mxfp8-experts", FP8_PATH, "_mxfp8_to_block_fp8_required", "_converts", "expected form"),
    ("mxfp8-experts", OVERRIDES_PATH, '"flashinfer_trtllm"', '"flashinfer"', "expected form"),
    ("moe-editions", MOE, "get_moe_configs", "load_moe_configs", "load_moe_configs"),
    ("moe-editions", MOE, "get_config_file_name", "config_name", "expected form"),
    ("moe-default", MOE, "get_default_config", "get_default_configs", "get_default_configs"),
    ("moe-capacity", MOE, "w1_shape, w2_shape", "shapes, w2_shape", "w1_shape"),
    ("inkling-stages", INKLING_PATH, "grouped_gemm_triton", "grouped_gemm", "grouped_gemm"),
)


@pytest.mark.parametrize(("name", "path", "old", "new", "named"), MANGLED)
def test_moved_is_reported_and_nothing_is_touched(
    tmp_path: Path, name: str, path: str, old: str, new: str, named: str
) -> None:
    root = synthetic.write(tmp_path)
    synthetic.mangle(root, path, old, new)
    before = synthetic.snapshot(root)
    result = synthetic.outcome(root, name)
    assert result.outcome is Outcome.MOVED, result
    assert named in result.detail
    assert not result.changed
    assert synthetic.snapshot(root) == before


def test_a_moved_change_does_not_keep_the_others_from_being_applied(tmp_path: Path) -> None:
    root = synthetic.write(tmp_path)
    synthetic.mangle(root, PREFILL_PATH, "context_attention_fwd", "context_attention_forward")
    found = synthetic.outcomes(root)
    assert found.pop("prefill-tiles") is Outcome.MOVED
    assert set(found.values()) == {Outcome.APPLIED}


TILES = """
    tile = (64, 64, 4) if Lq <= 64 else (64, 64, 8) if Lq <= 128 else (32, 64, 8)
    if CUDA_CAPABILITY[0] == 12:
        BLOCK_M, BLOCK_N, num_warps = tile if max(Lq, Lv) <= 288 else (16, 64, 8)
    return"""

MASKED_TILES = """
    if CUDA_CAPABILITY[0] == 12 and custom_mask is not None:
        BLOCK_M, BLOCK_N = 64 if Lq <= 64 else 32 if Lq <= 192 else 16, 64
    grid ="""

V4_BRANCH = """            self.page_size = 64
        if is_sm120_supported():
            envs.SGLANG_OPT_USE_TOPK_V2.set(False)"""

DONE_UPSTREAM = (
    ("extend-tiles", EXTEND_PATH, "    return", TILES),
    ("tree-mask-tiles", EXTEND_PATH, "    grid =", MASKED_TILES),
    ("prefill-tiles", PREFILL_PATH, "> 8:", "in (9, 10):"),
    ("hybrid-backends", REGISTRY_PATH, '== "triton"', 'in ("triton", "flashinfer")'),
    (
        "default-backend",
        ARGUMENTS_PATH,
        "is_blackwell_supported():\n            return",
        "is_sm100_supported():\n            return",
    ),
    ("trtllm-mla-prefill", ARGUMENTS_PATH, "is_blackwell_supported", "is_sm100_supported"),
    ("dsa-backends", ARGUMENTS_PATH, '"trtllm"', '"flashmla_kv"'),
    ("dsa-indexer", "sglang/srt/untouched.py", "print", "def _sm120_deep_gemm_apis_available(): ...\nprint"),
    ("v4-arguments", ARGUMENTS_PATH, "            self.page_size = 64", V4_BRANCH),
    ("v4-attention", "sglang/srt/untouched.py", "print", "def flash_mla_with_kvcache_sm120(): ...\nprint"),
    ("allreduce-fusion", COMMUNICATOR_PATH, "or _is_sm100_supported", "or _is_sm100_supported or _is_sm120_supported"),
    (
        "mxfp4-layout",
        MXFP4_PATH,
        "    quant_tensor =",
        "    layout = layout if is_sm120_supported() else layout\n    quant_tensor =",
    ),
    ("mxfp8-experts", FP8_PATH, "raise RuntimeError", "if not is_sm120(): raise RuntimeError"),
    ("moe-default", MOE, '"num_stages": 4', '"num_stages": 4 if not _use_low_smem_fp8_default() else 2'),
    ("moe-capacity", MOE, "    E, _, N = w2_shape", "    E, _, N = w2_shape\n    limit = shared_memory()"),
    ("inkling-stages", INKLING_PATH, "is_sm121", "small"),
)


@pytest.mark.parametrize(("name", "path", "old", "new"), DONE_UPSTREAM)
def test_done_upstream(tmp_path: Path, name: str, path: str, old: str, new: str) -> None:
    root = synthetic.write(tmp_path)
    synthetic.mangle(root, path, old, new)
    before = synthetic.snapshot(root)
    result = synthetic.outcome(root, name)
    assert result.outcome is Outcome.ALREADY_UPSTREAM, result
    assert result.detail and synthetic.snapshot(root) == before


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith(("dsa", "v4", "inkling", "allreduce", "mxfp8"))]
)
def test_absent_features_are_not_applicable(tmp_path: Path, name: str) -> None:
    absent = ("fp8.py", "nsa", "dsv4", "deepseek_v4", "inkling", "communicator", "comm_fusion")
    root = synthetic.write(tmp_path, {path: text for path, text in FILES.items() if not any(a in path for a in absent)})
    result = synthetic.outcome(root, name)
    assert result.outcome is Outcome.NOT_APPLICABLE, result
    assert result.detail


class Faulty(Change):
    """Edits two files and then fails in the way that `fault` says."""

    name = title = "faulty"
    why, merged = "For the test.", "never"

    def __init__(self, fault: Exception | None = None, text: str = "x = 1\n") -> None:
        self.fault, self.text = fault, text

    def transform(self, tree: Tree) -> None:
        for path in ("sglang/srt/untouched.py", "sglang/srt/environ.py"):
            tree.stage(path, self.text)
        if self.fault:
            raise self.fault

    def check(self, tree: Tree) -> None:
        raise FailedCheck("it had no effect")


@pytest.mark.parametrize(
    ("change", "outcome", "detail"),
    [
        (Faulty(), Outcome.FAILED, "it had no effect"),
        (Faulty(text="def ("), Outcome.FAILED, "not Python"),
        (Faulty(KeyError("surprise")), Outcome.MOVED, "KeyError"),
        (Faulty(NotApplicable("no such thing")), Outcome.NOT_APPLICABLE, "no such thing"),
    ],
)
def test_never_half_applied(tmp_path: Path, change: Faulty, outcome: Outcome, detail: str) -> None:
    root = synthetic.write(tmp_path)
    before = synthetic.snapshot(root)
    tree = Tree(root)
    result = apply(change, tree, {})
    assert result.outcome is outcome and detail in result.detail
    assert synthetic.snapshot(root) == before and not tree.staged


def extend_tile(theirs: tuple[int, int, int], dims: tuple[int, int], kv_bytes: int, plain: bool, triton: str) -> object:
    version = tuple(map(int, triton.split(".")))
    return own("attention_tiles").extend_tile(theirs, *dims, kv_bytes, plain, version)


def test_a_tile_of_the_release_that_spills_nothing_stays() -> None:
    assert extend_tile((64, 128, 8), (128, 128), 1, True, "3.9") == (64, 128, 8)
    assert extend_tile((128, 64, 8), (96, 96), 1, True, "3.9") == (128, 64, 8)
    assert extend_tile((64, 64, 8), (256, 256), 2, True, "3.9") == (64, 64, 8)
    assert extend_tile((64, 128, 4), (64, 64), 1, True, "3.6") == (64, 128, 4)


@pytest.mark.parametrize(
    ("theirs", "dims", "kv_bytes", "plain", "triton", "ours"),
    [
        ((64, 128, 8), (128, 128), 2, True, "3.9", (64, 64, 8)),  # spills with a 16-bit cache
        ((64, 128, 8), (128, 128), 1, True, "3.6", (64, 64, 8)),  # and with an older Triton
        ((64, 128, 8), (128, 128), 1, False, "3.9", (64, 64, 8)),  # was not measured with a window
        ((64, 64, 8), (256, 256), 1, True, "3.9", (32, 64, 8)),
        ((64, 64, 8), (192, 128), 2, True, "3.9", (32, 64, 8)),
        ((64, 128, 8), (576, 512), 2, True, "3.9", (16, 64, 8)),
    ],
)
def test_any_other_tile_is_replaced(
    theirs: tuple[int, int, int], dims: tuple[int, int], kv_bytes: int, plain: bool, triton: str, ours: object
) -> None:
    assert extend_tile(theirs, dims, kv_bytes, plain, triton) == ours


def test_windows_caps_and_masks_are_no_plain_attention() -> None:
    is_plain = own("attention_tiles").is_plain
    assert is_plain(-1, 0.0, None) and is_plain(None, 0, None, False)
    assert not (is_plain(128, 0.0) or is_plain(-1, 30.0) or is_plain(-1, 0.0, object()))


ONE_STAGE = """
def extend_attention_fwd_unified(q, o, k_buffer, v_buffer, max_len_extend, custom_mask=None, sinks=None):
    Lq, Lv = q.shape[-1], v_buffer.shape[-1]
    _, _, _, BLOCK_M, BLOCK_N, num_warps = _get_block_sizes_for_extend_attention(Lq, Lv)
    _fwd_kernel_unified[(1,)](q, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=num_warps)
"""


def test_the_launcher_of_one_stage_takes_the_tiles_too(tmp_path: Path) -> None:
    root = synthetic.write(tmp_path, {**FILES, EXTEND_PATH: EXTEND + ONE_STAGE})
    assert synthetic.outcome(root, "extend-tiles").outcome is Outcome.APPLIED
    text = (root / EXTEND_PATH).read_text()
    assert text.count("= sm120_extend_tile(") == 2 and "sm120_is_plain(custom_mask)" in text
    synthetic.mangle(root, EXTEND_PATH, "    _fwd_kernel_unified", "    BLOCK_M = 128\n    _fwd_kernel_unified")
    result = synthetic.outcome(root, "extend-tiles")
    assert result.outcome is Outcome.FAILED and "extend_attention_fwd_unified does not take" in result.detail


def test_arguments_that_nobody_asked_for_have_the_default_of_the_release(tmp_path: Path) -> None:
    """As in 0.5.10, whose predicate asks for the size of context parallelism."""
    asks = "get_global_server_args().enable_flashinfer_allreduce_fusion"
    more = f"{asks}\n        and get_global_server_args().attn_cp_size <= 1"
    root = synthetic.write(tmp_path)
    synthetic.mangle(root, COMMUNICATOR_PATH, asks, more)
    assert "no argument attn_cp_size" in synthetic.outcome(root, "allreduce-fusion").detail
    synthetic.mangle(root, ARGUMENTS_PATH, "class ServerArgs:\n", "class ServerArgs:\n    attn_cp_size: int = 1\n\n")
    assert synthetic.outcome(root, "allreduce-fusion").outcome is Outcome.APPLIED


def test_a_change_that_was_undone_by_hand_fails_its_check(tmp_path: Path) -> None:
    root = synthetic.write(tmp_path)
    synthetic.outcome(root, "extend-tiles")
    path = root / OPS / "extend_attention.py"
    path.write_text(path.read_text().replace("if USE_SM120_TILES:", "if False:"))
    result = synthetic.outcome(root, "extend-tiles")
    assert result.outcome is Outcome.FAILED and "measured tiles" in result.detail


@pytest.mark.parametrize(
    ("condition", "detail"),
    [("False", "does not get"), ("USE_SM120_TILES", "without a mask"), ("custom_mask", "no longer")],
)
def test_the_tile_for_masks_is_for_masks_and_sm12x_alone(tmp_path: Path, condition: str, detail: str) -> None:
    root = synthetic.write(tmp_path)
    synthetic.outcome(root, "tree-mask-tiles")
    synthetic.mangle(root, EXTEND_PATH, "USE_SM120_TILES and custom_mask is not None", condition)
    result = synthetic.outcome(root, "tree-mask-tiles")
    assert result.outcome is Outcome.FAILED and detail in result.detail


def test_rows_that_are_no_multiple_of_16_take_smaller_prefill_blocks() -> None:
    block = own("attention_tiles").prefill_block
    assert [block(head_dim) for head_dim in (64, 72, 80, 136, 256, 512)] == [64, 32, 64, 32, 64, 32]


def test_a_file_of_ours_that_is_someone_elses_is_not_overwritten(tmp_path: Path) -> None:
    root = synthetic.write(tmp_path, {**FILES, f"{OWN}hardware.py": "theirs = True\n"})
    result = synthetic.outcome(root, "extend-tiles")
    assert result.outcome is Outcome.MOVED and "hardware.py" in result.detail


def test_an_ambiguous_symbol_is_moved(tmp_path: Path) -> None:
    root = synthetic.write(tmp_path, {**FILES, "sglang/kernels/ops/attention/extend_attention.py": EXTEND})
    result = synthetic.outcome(root, "extend-tiles")
    assert result.outcome is Outcome.MOVED and "more than once" in result.detail


def test_marks_go_below_a_shebang() -> None:
    assert mark("#!/usr/bin/python\n# -*- coding: utf-8 -*-\nx = 1\n", "# M").splitlines()[2] == "# M"
    assert mark("x = 1\n", "# M") == "# M\nx = 1\n"
