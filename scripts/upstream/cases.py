"""The launches that upstream's default paths make on an SM120 card, as calls of its own launcher functions.

Shapes are those of the models that must run, per rank at the usual tensor-parallel sizes. Every tensor is a meta
tensor: only its type and shape matter. A launcher gets those of the arguments named here that it takes, so that a
parameter that another release added or dropped needs no second version of a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

Arguments = Callable[[ModuleType], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One call. `required`: every release has the launcher, so that its absence means that it moved."""

    op: str
    key: str
    launcher: str
    file: str
    arguments: Arguments
    """From the module that defines the launcher."""
    required: bool = True


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


def floats(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.float32)


FP8 = torch.float8_e4m3fn
KV_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": FP8, "fp8_e5m2": torch.float8_e5m2}
BATCH, TOKENS, SLOTS, SPLITS = 4, 512, 4096, 8


@dataclass(frozen=True, slots=True)
class Attention:
    """Heads of a rank. `shared`: V is the head of K's rows (absorbed MLA)."""

    models: str
    qk: int
    v: int
    heads: int
    kv_heads: int
    sinks: bool = False
    window: int = -1
    shared: bool = False


ATTENTION = (
    Attention("GPT-OSS", 64, 64, 64, 8, sinks=True),
    Attention("GPT-OSS sliding", 64, 64, 64, 8, sinks=True, window=128),
    Attention("small MHA", 64, 64, 16, 16),
    Attention("odd head dim", 80, 80, 16, 4),
    Attention("Phi", 96, 96, 32, 32),
    Attention("GLM-4.7, Qwen3, MiniMax-M2", 128, 128, 12, 1),
    Attention("MHA", 128, 128, 32, 32),
    Attention("DeepSeek and Kimi, not absorbed", 192, 128, 16, 16),
    Attention("MiMo", 192, 128, 16, 2),
    Attention("GLM-5, not absorbed", 256, 256, 8, 8),
    Attention("Qwen3.5, Gemma", 256, 256, 16, 2),
    Attention("MLA with 256 + 32", 288, 256, 16, 1, shared=True),
    Attention("DeepSeek-V4, Gemma 4", 512, 512, 8, 1),
    Attention("DeepSeek and Kimi, absorbed", 576, 512, 16, 1, shared=True),
)

VISION_HEAD_DIMS = (64, 72, 80, 96, 128, 160, 192, 256)


def _kv(shape: Attention, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k = tensor(rows, shape.kv_heads, shape.qk, dtype=dtype)
    return k, k[..., : shape.v] if shape.shared else tensor(rows, shape.kv_heads, shape.v, dtype=dtype)


def _attention_common(shape: Attention, kv_dtype: torch.dtype) -> dict[str, Any]:
    k_buffer, v_buffer = _kv(shape, SLOTS, kv_dtype)
    return {
        "k_buffer": k_buffer,
        "v_buffer": v_buffer,
        "kv_indptr": ints(BATCH + 1),
        "kv_indices": tensor(SLOTS, dtype=torch.int64),
        "k_scale": 1.0,
        "v_scale": 1.0,
        "sm_scale": shape.qk**-0.5,
        "logit_cap": 0.0,
        "sinks": floats(shape.heads) if shape.sinks else None,
    }


def _extend(shape: Attention, kv_dtype: torch.dtype, masked: bool) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        k, v = _kv(shape, TOKENS, torch.bfloat16)
        return _attention_common(shape, kv_dtype) | {
            "q_extend": tensor(TOKENS, shape.heads, shape.qk),
            "k_extend": k,
            "v_extend": v,
            "o_extend": tensor(TOKENS, shape.heads, shape.v),
            "qo_indptr": ints(BATCH + 1),
            "custom_mask": tensor(TOKENS * SLOTS, dtype=torch.bool) if masked else None,
            "mask_indptr": tensor(BATCH + 1, dtype=torch.int64) if masked else None,
            "is_causal": True,
            "max_len_extend": TOKENS,
            "sliding_window_size": shape.window,
            "window_kv_offsets": ints(BATCH) if shape.window > 0 else None,
        }

    return arguments


def _decode(shape: Attention, kv_dtype: torch.dtype) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        return _attention_common(shape, kv_dtype) | {
            "q": tensor(BATCH, shape.heads, shape.qk),
            "o": tensor(BATCH, shape.heads, shape.v),
            "attn_logits": floats(BATCH, shape.heads, SPLITS, shape.v),
            "attn_lse": floats(BATCH, shape.heads, SPLITS),
            "num_kv_splits": ints(BATCH),
            "max_kv_splits": SPLITS,
            "has_mla": shape.shared,
        }

    return arguments


def _prefill(head_dim: int, causal: bool) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        q, k, v, o = (tensor(TOKENS, 16, head_dim) for _ in range(4))
        lengths = {"b_start_loc": ints(BATCH), "b_seq_len": ints(BATCH), "max_input_len": TOKENS}
        return {"q": q, "k": k, "v": v, "o": o, "is_causal": causal, **lengths}

    return arguments


def attention_cases() -> Iterator[Case]:
    for shape in ATTENTION:
        for kv_name, kv_dtype in KV_DTYPES.items():
            key = f"{shape.qk}/{shape.v} heads {shape.heads}/{shape.kv_heads}, KV {kv_name} ({shape.models})"
            yield Case(
                "extend", key, "extend_attention_fwd", "extend_attention.py", _extend(shape, kv_dtype, masked=False)
            )
            yield Case("decode", key, "decode_attention_fwd", "decode_attention.py", _decode(shape, kv_dtype))
            if shape.window < 0 and not shape.sinks:
                arguments = _extend(shape, kv_dtype, masked=True)
                yield Case("extend, tree mask", key, "extend_attention_fwd", "extend_attention.py", arguments)
    for head_dim in VISION_HEAD_DIMS:
        for causal in (False, True):
            key = f"head dim {head_dim}{', causal' if causal else ''}"
            yield Case("prefill", key, "context_attention_fwd", "prefill_attention.py", _prefill(head_dim, causal))


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one rank: `inter` columns of each. `weights`: bf16, fp8 (a scale per channel) or fp8_block (128 x
    128)."""

    models: str
    count: int
    inter: int
    hidden: int
    topk: int
    weights: str


EXPERTS = (
    Experts("GLM-4.7 TP8", 161, 192, 5120, 9, "fp8"),
    Experts("GLM-4.7 TP4", 161, 384, 5120, 9, "fp8"),
    Experts("GLM-4.7 TP8, not fused", 160, 192, 5120, 8, "fp8"),
    Experts("Kimi-K2 TP8", 384, 256, 7168, 8, "bf16"),
    Experts("DeepSeek-V3.2 TP8", 257, 256, 7168, 9, "fp8_block"),
    Experts("DeepSeek-V4 TP8", 256, 256, 4096, 6, "fp8_block"),
    Experts("GPT-OSS", 128, 2880, 2880, 4, "bf16"),
    Experts("Qwen3.5 TP1", 256, 512, 2048, 8, "bf16"),
    Experts("Qwen3.5 TP1", 256, 512, 2048, 8, "fp8_block"),
    Experts("Qwen3-30B TP1", 128, 768, 2048, 8, "bf16"),
    Experts("Qwen3-30B TP1", 128, 768, 2048, 8, "fp8_block"),
    Experts("GLM-5 TP8", 257, 256, 6144, 9, "fp8_block"),
    Experts("MiniMax-M2 TP4", 256, 384, 3072, 8, "fp8_block"),
)
MOE_TOKENS = (1, 16, 64, 256, 1024, 8192)


def _experts(shape: Experts, tokens: int) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        count, inter, hidden = shape.count, shape.inter, shape.hidden
        weights = torch.bfloat16 if shape.weights == "bf16" else FP8
        block = [128, 128] if shape.weights == "fp8_block" else None
        scales: dict[str, Any] = {}
        if shape.weights == "fp8":
            scales = {"w1_scale": floats(count, 2 * inter, 1), "w2_scale": floats(count, hidden, 1)}
        elif block:
            scales = {
                "w1_scale": floats(count, -(-2 * inter // 128), -(-hidden // 128)),
                "w2_scale": floats(count, -(-hidden // 128), -(-inter // 128)),
            }
        return scales | {
            "hidden_states": tensor(tokens, hidden),
            "w1": tensor(count, 2 * inter, hidden, dtype=weights),
            "w2": tensor(count, hidden, inter, dtype=weights),
            "topk_weights": floats(tokens, shape.topk),
            "topk_ids": ints(tokens, shape.topk),
            "inplace": True,  # as the layers call it
            "use_fp8_w8a8": shape.weights != "bf16",
            "per_channel_quant": shape.weights == "fp8",
            "block_shape": block,
        }

    return arguments


def _fp8_linear(tokens: int, columns: int, hidden: int) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        return {
            "A": tensor(tokens, hidden, dtype=FP8),
            "B": tensor(columns, hidden, dtype=FP8),
            "As": floats(tokens, hidden // 128),
            "Bs": floats(-(-columns // 128), hidden // 128),
            "block_size": [128, 128],
            "output_dtype": torch.bfloat16,
        }

    return arguments


def _inkling(tokens: int, columns: int, hidden: int) -> Arguments:
    count, topk = 64, 8

    def arguments(module: ModuleType) -> dict[str, Any]:
        rows = tokens * topk
        block = module.select_grouped_gemm_block_m(rows)
        return {
            "a": tensor(rows, hidden),
            "b": tensor(count, columns, hidden),
            "num_experts": count,
            "num_tokens_per_expert": ints(count),
            "expert_token_offs": ints(count + 1),
            "expert_block_offs": ints(count + 1),
            "expert_block_schedule": ints(rows // block + count),
            "block_size_m": block,
        }

    return arguments


def _sparse_mla(heads: int, extra: bool) -> Arguments:
    """DeepSeek-V4: 584 bytes a token (448 fp8, 64 bf16, scales), pages of 256; the sliding window and the selection."""

    def arguments(_: ModuleType) -> dict[str, Any]:
        cache = tensor(64, 256, 1, 584, dtype=torch.uint8)
        return {
            "q": tensor(BATCH, 1, heads, 512),
            "k_cache": cache,
            "indices": ints(BATCH, 1, 128),
            "topk_length": ints(BATCH),
            "attn_sink": floats(heads),
            "head_dim_v": 512,
            "softmax_scale": 512**-0.5,
            "extra_k_cache": cache if extra else None,
            "extra_indices": ints(BATCH, 1, 512) if extra else None,
            "extra_topk_length": ints(BATCH) if extra else None,
        }

    return arguments


def _gated_delta(decode: bool) -> Arguments:
    """Qwen3.5: 16 key and 32 value heads of 128. Sequence lengths are read on the host, so they are real."""
    keys, values, dim = 16, 32, 128

    def arguments(_: ModuleType) -> dict[str, Any]:
        rows = (BATCH, 1) if decode else (1, TOKENS)
        per_head = {"a": tensor(rows[0] * rows[1], values), "b": tensor(rows[0] * rows[1], values)}
        return per_head | {
            "q": tensor(*rows, keys, dim),
            "k": tensor(*rows, keys, dim),
            "v": tensor(*rows, values, dim),
            "g": floats(*rows, values),
            "beta": tensor(*rows, values),
            "A_log": floats(values),
            "dt_bias": floats(values),
            "scale": dim**-0.5,
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "initial_state": floats(SLOTS, values, dim, dim),
            "initial_state_source": floats(SLOTS, values, dim, dim),
            "initial_state_indices": ints(BATCH),
            "use_qk_l2norm_in_kernel": True,
            "cu_seqlens": None if decode else torch.arange(0, TOKENS + 1, TOKENS // BATCH),
        }

    return arguments


def _added_sparse_mla(head_dim: int, token_bytes: int, topk: int, sink: bool) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        return {
            "q": tensor(BATCH, 1, 64, head_dim),
            "k_cache": tensor(64, 64, 1, token_bytes, dtype=torch.uint8),
            "is_fp8_kvcache": True,
            "indices": ints(BATCH, 1, topk),
            "topk_length": ints(BATCH),
            "attn_sink": floats(64) if sink else None,
        }

    return arguments


def _added_prefill_mla(_: ModuleType) -> dict[str, Any]:
    return {
        "q": tensor(TOKENS, 64, 576),
        "kv": tensor(SLOTS, 1, 576),
        "indices": ints(TOKENS, 1, 2048),
        "sm_scale": 192**-0.5,
    }


def _added_paged_logits(heads: int) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        return {
            "q": tensor(BATCH, 1, heads, 128, dtype=FP8),
            "kv_cache": tensor(64, 64, 1, 132, dtype=torch.uint8),
            "weights": floats(BATCH, heads),
            "context_lens": ints(BATCH),
            "block_tables": ints(BATCH, 64),
            "schedule_metadata": None,
            "max_context_len": SLOTS,
        }

    return arguments


def _added_ragged_logits(heads: int) -> Arguments:
    def arguments(_: ModuleType) -> dict[str, Any]:
        return {
            "q": tensor(TOKENS, heads, 128, dtype=FP8),
            "kv": (tensor(SLOTS, 128, dtype=FP8), floats(SLOTS)),
            "weights": floats(TOKENS, heads),
            "cu_seq_len_k_start": ints(TOKENS),
            "cu_seq_len_k_end": ints(TOKENS),
        }

    return arguments


def _added_topk(columns: int) -> Arguments:
    return lambda _: {"score": floats(BATCH, columns), "lengths": ints(BATCH), "topk": 2048}


def added_cases() -> Iterator[Case]:
    """The cases of the kernels that our changes bring along; a pristine tree has none of them."""
    mla, logits = "sm120/flash_mla.py", "sm120/deep_gemm.py"
    for key, arguments in (
        ("DeepSeek-V3.2, GLM-5", _added_sparse_mla(576, 656, 2048, sink=False)),
        ("DeepSeek-V4", _added_sparse_mla(512, 584, 128, sink=True)),
    ):
        yield Case("our sparse mla", key, "flash_mla_with_kvcache", mla, arguments, required=False)
    yield Case("our sparse mla", "prefill", "flash_mla_sparse_fwd", mla, _added_prefill_mla, required=False)
    for columns in (4096, 16384, 131_072):
        key, case = f"2,048 of {columns:,}", _added_topk(columns)
        yield Case("our top-k", key, "fast_topk_v2", "sm120/topk.py", case, required=False)
    for heads in (32, 64):
        for name, arguments in (
            ("fp8_paged_mqa_logits", _added_paged_logits(heads)),
            ("fp8_mqa_logits", _added_ragged_logits(heads)),
        ):
            yield Case("our indexer", f"{name}, {heads} heads", name, logits, arguments, required=False)


def other_cases() -> Iterator[Case]:
    for shape in EXPERTS:
        for tokens in MOE_TOKENS:
            key = f"E={shape.count} N={shape.inter} {shape.weights}, {tokens} tokens ({shape.models})"
            yield Case("moe", key, "fused_experts_impl", "fused_moe.py", _experts(shape, tokens))
    for tokens in (16, 4096):
        for columns, hidden in ((1536, 7168), (7168, 2048), (4096, 4096)):
            key = f"{columns} x {hidden}, {tokens} tokens"
            arguments = _fp8_linear(tokens, columns, hidden)
            yield Case("fp8 linear", key, "w8a8_block_fp8_matmul_triton", "fp8_kernel.py", arguments)
    for tokens in (1, 64, 4096):
        for columns, hidden in ((1024, 1536), (1536, 512), (2880, 2880)):
            key = f"{columns} x {hidden}, {tokens} tokens"
            arguments = _inkling(tokens, columns, hidden)
            yield Case("inkling moe", key, "grouped_gemm_triton", "inkling_moe.py", arguments, required=False)
    for name, file, decode in (
        ("chunk_gated_delta_rule_fwd", "chunk.py", False),
        ("fused_sigmoid_gating_delta_rule_update", "fused_sigmoid_gating_recurrent.py", True),
    ):
        key = f"{'decode' if decode else 'prefill'}, 16/32 heads of 128 (Qwen3.5)"
        yield Case("gated delta net", key, name, file, _gated_delta(decode), required=False)
    for heads in (8, 64):
        for extra in (False, True):
            key = f"{heads} heads{', window and selection' if extra else ''}"
            file = "flash_mla_sm120_triton.py"
            yield Case(
                "sparse mla", key, "flash_mla_sparse_decode_triton", file, _sparse_mla(heads, extra), required=False
            )


def default_cases() -> list[Case]:
    return [*attention_cases(), *other_cases(), *added_cases()]
