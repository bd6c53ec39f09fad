"""Small trees with the symbols that changes anchor on, and nothing else of upstream: the text is ours."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from upstream.change import Outcome, Result, apply, markers
from upstream.changes import ALL
from upstream.tree import Tree

OPS = "sglang/srt/layers/attention/triton_ops"
ATTENTION = "sglang/srt/layers/attention"
MOE = "sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_config.py"

EXTEND = """
import triton

def _get_block_sizes_for_extend_attention(Lq, Lv):
    BLOCK_DMODEL, BLOCK_DPE, BLOCK_DV = triton.next_power_of_2(Lq), 0, triton.next_power_of_2(Lv)
    if CUDA_CAPABILITY[0] >= 9:
        BLOCK_M, BLOCK_N = (128, 64) if Lq <= 256 else (32, 64)
    else:
        BLOCK_M, BLOCK_N = 64, 32
    num_warps = 4 if Lq <= 64 else 8
    return BLOCK_DMODEL, BLOCK_DPE, BLOCK_DV, BLOCK_M, BLOCK_N, num_warps

def extend_attention_fwd(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
                         custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale):
    Lq, Lv = q_extend.shape[-1], v_extend.shape[-1]
    _, _, _, BLOCK_M, BLOCK_N, num_warps = _get_block_sizes_for_extend_attention(Lq, Lv)
    grid = (1, triton.cdiv(max_len_extend, BLOCK_M))
    _fwd_kernel[grid](q_extend, custom_mask, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=num_warps)
"""

PREFILL = """
import triton

def context_attention_fwd(q, k, v, o, b_start_loc, b_seq_len, max_input_len, is_causal=True):
    if _is_cuda and CUDA_CAPABILITY[0] > 8:
        BLOCK = 128
    else:
        BLOCK = 64
    grid = (1, triton.cdiv(max_input_len, BLOCK))
    _fwd_kernel[grid](q, k, BLOCK_M=BLOCK, BLOCK_N=BLOCK)
"""

REGISTRY = """
def attn_backend_wrapper(runner, full_attn_backend):
    if is_blackwell():
        assert (
            runner.server_args.attention_backend == "triton"
            or runner.server_args.attention_backend == "trtllm_mha"
        ), "hybrid models"
    return full_attn_backend
"""

ARGUMENTS = """
import json

class ServerArgs:
    def _set_default_nsa_backends(self, kv_cache_dtype, major):
        if kv_cache_dtype == "fp8_e4m3":
            choice = "trtllm" if major >= 10 else "flashmla_kv"
            self.nsa_prefill_backend = self.nsa_decode_backend = choice
        else:
            self.nsa_prefill_backend = "flashmla_sparse"
            self.nsa_decode_backend = "trtllm" if major >= 10 else "fa3"

    def _get_default_attn_backend(self, use_mla_backend, model_config):
        if is_blackwell_supported():
            return "trtllm_mla" if use_mla_backend else "trtllm_mha"
        return "triton"

    def _handle_attention_backend_compatibility(self):
        if self.attention_backend is None:
            self.attention_backend = self._get_default_attn_backend(self.use_mla_backend(), None)
        if self.attention_backend == "trtllm_mla":
            if not is_blackwell_supported():
                raise ValueError("wrong GPU")
            self.page_size = 64
"""

BACKEND = """
import torch

class NativeSparseAttnBackend:
    def start(self):
        import deep_gemm

        return deep_gemm.get_num_sms()

    def topk_transform(self, logits, lengths, topk):
        from sgl_kernel import fast_topk_v2

        return fast_topk_v2(logits, lengths, topk)

    def _forward_flashmla_sparse(self, q_all, kv_cache, page_table_1, sm_scale):
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd

        num_heads = q_all.shape[1]
        required_padding = 128 if self.device_sm_major >= 10 else 64
        return flash_mla_sparse_fwd(q_all, kv_cache, page_table_1, sm_scale), required_padding

    def _forward_flashmla_kv(self, q_all, kv_cache, page_table_1, sm_scale):
        from sgl_kernel.flash_mla import flash_mla_with_kvcache

        num_q_heads = q_all.shape[2]
        target_q_heads = self.flashmla_kv_num_q_heads
        return flash_mla_with_kvcache(q_all, kv_cache), target_q_heads
"""

INDEXER = """
import contextlib

if _is_cuda:
    try:
        import deep_gemm
    except ImportError as e:
        deep_gemm = e

class Indexer:
    @contextlib.contextmanager
    def _with_real_sm_count(self):
        with deep_gemm_wrapper.configure_deep_gemm_num_sms(self.sm_count):
            yield

    def _get_topk_ragged_with_cp(self, q_fp8):
        return deep_gemm.fp8_mqa_logits(q_fp8)
"""

V4_BACKEND = """
import torch

def _create_flashmla_metadata():
    import flash_mla

    return flash_mla.get_mla_metadata()[0]
"""

V4_INDEXER = """
import torch

class C4IndexerBackendMixin:
    def forward_c4_indexer(self, use_fp4_indexer):
        if use_fp4_indexer:
            from deep_gemm import fp8_fp4_paged_mqa_logits as fn
        else:
            from deep_gemm import fp8_paged_mqa_logits as fn
        return fn
"""

V4_METADATA = """
import torch

class PagedIndexerMetadata:
    def __post_init__(self):
        import deep_gemm
        from deep_gemm import get_paged_mqa_logits_metadata

        self.deep_gemm_metadata = get_paged_mqa_logits_metadata(deep_gemm.get_num_sms())
"""

V4_HOOK = """
import logging

def apply_deepseek_v4_defaults(server_args, model_arch):
    server_args.page_size = 256
"""

V4_MARLIN = """
from sglang.srt.utils.common import is_sm90_supported

class Mxfp4MarlinMoEMethod:
    def process_weights_after_loading(self, layer):
        if not is_sm90_supported():
            raise RuntimeError("wrong GPU")
"""

ENVIRON = """
class Envs:
    SGLANG_OPT_FP8_WO_A_GEMM = EnvBool(True)
    SGLANG_OPT_USE_TOPK_V2 = EnvBool(True)
"""

COMMUNICATOR = """
import torch

def apply_flashinfer_allreduce_fusion(batch_size):
    return (
        (_is_sm90_supported or _is_sm100_supported)
        and _is_flashinfer_available
        and 0 < batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE
        and get_global_server_args().enable_flashinfer_allreduce_fusion
    )
"""

FUSION = """
import torch

def flashinfer_allreduce_residual_rmsnorm(x):
    return x

def _resolve_backend(backend, is_multi_node=False):
    if not (is_sm90_supported() or is_sm100_supported()):
        raise ValueError("wrong GPU")
    return backend
"""

MXFP4 = """
import torch

def _swizzle_mxfp4(quant_tensor, scale, num_warps):
    import triton_kernels.opt_flags as opt_flags
    from triton_kernels.tensor import convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    value_layout, value_layout_opts = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_layout_opts = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=num_warps)
    quant_tensor = convert_layout(wrap_torch_tensor(quant_tensor), value_layout, **value_layout_opts)
    return quant_tensor, convert_layout(wrap_torch_tensor(scale), scale_layout, **scale_layout_opts)
"""

FP8 = """
import torch

class Fp8MoEMethod:
    def __init__(self, quant_config):
        self.quant_config = quant_config
        self.convert_mxfp8_to_block = quant_config.use_mxfp8 and _mxfp8_to_block_fp8_required

    def _process_mxfp8_moe_weights(self, layer):
        raise RuntimeError("wrong GPU")

def convert_mxfp8_weight_to_block_fp8(weight, scale):
    return weight, scale
"""

OVERRIDES = """
import torch

def _moe_runner_backend_quant_constraints(view):
    chosen = view.moe_runner_backend
    if view.quantization == "mxfp8" and chosen == "auto":
        mxfp8_default = "triton" if is_gfx95_mxfp8 else "flashinfer_trtllm"
        return {"moe_runner_backend": mxfp8_default}
    return {}
"""

MOE_CONFIGS = """
import functools
import json
import os

def get_config_file_name(E, N, dtype):
    return f"E={E},N={N},device_name={get_device_name()}.json"

@functools.lru_cache
def get_moe_configs(E, N, dtype):
    path = os.path.join(os.path.dirname(__file__), get_config_file_name(E, N, dtype))
    if os.path.exists(path):
        with open(path) as file:
            return json.load(file)
    return None

def get_default_config(M, E, N, K, topk, dtype, is_marlin, block_shape=None):
    if dtype == "fp8_w8a8" and block_shape is None:
        config = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_warps": 8, "num_stages": 4}
    else:
        config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}
    return config

def try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M, return_down_config=False):
    E, _, N = w2_shape
    config = get_default_config(M, E, N, w1_shape[2], top_k, dtype, False)
    if return_down_config:
        return config, (None, None)
    return config
"""

INKLING = """
from sglang.srt.utils.common import is_sm121

def grouped_gemm_triton(a, b):
    config = {"BLOCK_SIZE_M": 16, "num_stages": 3 if is_sm121() else 4}
    return launch(a, b, **config)
"""

FILES: Mapping[str, str] = {
    f"{OPS}/extend_attention.py": EXTEND,
    f"{OPS}/prefill_attention.py": PREFILL,
    f"{ATTENTION}/attention_registry.py": REGISTRY,
    f"{ATTENTION}/nsa_backend.py": BACKEND,
    f"{ATTENTION}/nsa/nsa_indexer.py": INDEXER,
    f"{ATTENTION}/deepseek_v4_backend.py": V4_BACKEND,
    f"{ATTENTION}/dsv4/indexer.py": V4_INDEXER,
    f"{ATTENTION}/dsv4/metadata.py": V4_METADATA,
    "sglang/srt/arg_groups/deepseek_v4_hook.py": V4_HOOK,
    "sglang/srt/layers/quantization/mxfp4_marlin_moe.py": V4_MARLIN,
    "sglang/srt/environ.py": ENVIRON,
    "sglang/srt/server_args.py": ARGUMENTS,
    "sglang/srt/layers/communicator.py": COMMUNICATOR,
    "sglang/srt/layers/flashinfer_comm_fusion.py": FUSION,
    "sglang/srt/layers/quantization/mxfp4.py": MXFP4,
    "sglang/srt/layers/quantization/fp8.py": FP8,
    "sglang/srt/arg_groups/overrides.py": OVERRIDES,
    MOE: MOE_CONFIGS,
    "sglang/kernels/ops/moe/inkling_moe.py": INKLING,
    "sglang/srt/untouched.py": "print('as it was')\n",
}
"""A release that needs every change."""

KERNEL = """
import torch
import triton
import triton.language as tl

CUDA_CAPABILITY = torch.cuda.get_device_capability()
_is_cuda, _is_hip = True, False

@triton.jit
def _fwd_kernel(X, MASK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x = tl.load(X + rows[:, None] * 16 + tl.arange(0, 16)[None, :]).to(tl.float16)
    y = tl.load(X + columns[None, :] * 16 + tl.arange(0, 16)[:, None]).to(tl.float16)
    tl.store(X + rows[:, None] * BLOCK_N + columns[None, :], tl.dot(x, y).to(X.dtype.element_ty))
"""
"""What the launchers of the small trees launch; put before their text, it makes them run."""

DECODE = """
def decode_attention_fwd(q, k_buffer, v_buffer, o):
    _fwd_kernel[(1,)](q, k_buffer, BLOCK_M=16, BLOCK_N=16)
"""

FUSED_MOE = """
def fused_experts_impl(hidden_states, w1, w2):
    _fwd_kernel[(1,)](hidden_states, w1, BLOCK_M=64, BLOCK_N=64)
"""

FP8_KERNEL = """
def w8a8_block_fp8_matmul_triton(A, B, As, Bs, block_size):
    _fwd_kernel[(1,)](A, B, BLOCK_M=64, BLOCK_N=64)
"""

THIRD_PARTY = (
    "IPython PIL compressed_tensors dill einops fastapi gguf msgspec numpy openai orjson packaging partial_json_parser "
    "psutil pybase64 pydantic pynvml requests sgl_kernel starlette tqdm transformers triton_kernels xgrammar zmq"
)
"""What modules of the releases import, without an `except`, when the launchers of `cases` are loaded."""

START = """
def set_global_server_args_for_scheduler(arguments):
    assert arguments.model_path
"""


def runnable() -> dict[str, str]:
    """`FILES` as a tree whose launchers can be called, so that `verify` can compile what they launch.

    Without the operations whose launchers are optional; their seams are not here.
    """
    start = "class ServerArgs:\n    def __init__(self, model_path):\n        self.model_path = model_path\n"
    text = ARGUMENTS.replace("class ServerArgs:", start)
    imports = "".join(f"import {name}\n" for name in THIRD_PARTY.split())
    return {path: text for path, text in FILES.items() if "inkling" not in path} | {
        "sglang/__init__.py": "raise AssertionError('the client library is imported')",
        "sglang/srt/server_args.py": imports + text + START,
        f"{OPS}/extend_attention.py": KERNEL + EXTEND,
        f"{OPS}/prefill_attention.py": KERNEL + PREFILL,
        f"{OPS}/decode_attention.py": KERNEL + DECODE,
        "sglang/srt/layers/moe/fused_moe_triton/fused_moe.py": KERNEL + FUSED_MOE,
        "sglang/srt/layers/quantization/fp8_kernel.py": KERNEL + FP8_KERNEL,
    }


LICENSE = "Apache License, Version 2.0\n"


def write(root: Path, files: Mapping[str, str] = FILES) -> Path:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text).lstrip("\n"))
    (root / "LICENSE").write_text(LICENSE)
    return root


def mangle(root: Path, path: str, old: str, new: str) -> None:
    """What upstream might do next: `old` in `path` becomes `new`."""
    text = (root / path).read_text()
    assert old in text
    (root / path).write_text(text.replace(old, new))


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def outcome(root: Path, name: str) -> Result:
    """Applies one change to the tree on disk."""
    (change,) = (each for each in ALL if each.name == name)
    tree = Tree(root)
    return apply(change(), tree, markers(tree))


def outcomes(root: Path) -> dict[str, Outcome]:
    """Applies every change to the tree on disk."""
    tree = Tree(root)
    marked = markers(tree)
    return {change.name: apply(change(), tree, marked).outcome for change in ALL}
