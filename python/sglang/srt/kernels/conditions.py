"""Conditions of kernels: the GPU features that they need, what they refuse, from which sizes on they are faster, and
remarks for `explain`.

A refusal takes (need, arch) and returns the reasons against the kernel; an empty list if there are none. "(has ...)" in
a reason lists what the kernel supports.
"""

from __future__ import annotations

from sglang.srt.configs.quant_scheme import SCHEMES, describe_dequantization
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Need, Refuse
from sglang.srt.kernels.tiles import MLA_LATENT

NOT_YET = "not implemented yet in sm120-sglang"
NOT_PART = "not part of sm120-sglang"

CP_ASYNC = frozenset({"cp_async"})
SM12X_PRODUCTS = frozenset({"block_scaled_mma", "mma_sync_block_scale"})
TCGEN05 = frozenset({"tcgen05"})
WGMMA = frozenset({"wgmma"})
NVLINK = frozenset({"nvlink"})


def all_of(*refusals: Refuse) -> Refuse:
    """Returns a refusal with the reasons of all `refusals`."""
    return lambda need, arch: [reason for refuse in refusals for reason in refuse(need, arch)]


def lacks(*traits: str) -> Refuse:
    """Returns a refusal of needs that have any of these traits."""
    return lambda need, arch: [f"no support for {trait.replace('_', ' ')}" for trait in traits if trait in need.traits]


def biased_heads(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses relative biases where the dims of keys and values are not the same power of two."""
    equal = need.head_dim == need.v_head_dim and not need.head_dim & (need.head_dim - 1)
    if equal or "relative_bias" not in need.traits:
        return []
    return [f"relative bias: heads of {need.head_dim}, {need.v_head_dim} dims (has equal powers of two)"]


def only_dtypes(*dtypes: str) -> Refuse:
    """Returns a refusal of needs whose activations have none of `dtypes`."""
    return lambda need, arch: [] if need.q_dtype in dtypes else [f"no {need.q_dtype} (has {', '.join(dtypes)})"]


def only_quant(*schemes: str | None) -> Refuse:
    """Returns a refusal of needs whose quantization scheme is not in `schemes`; None stands for unquantized weights."""

    def refuse(need: Need, arch: ArchTraits) -> list[str]:
        if need.quant in schemes:
            return []
        has = "unquantized" if schemes == (None,) else ", ".join(scheme or "unquantized" for scheme in schemes)
        return [f"no {need.quant} (has {has})" if need.quant else "no unquantized weights"]

    return refuse


def only_latent(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses attention other than latent attention."""
    return [] if "mla" in need.traits else ["serves latent attention (MLA) only"]


def only_full_heads(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses latent attention."""
    return ["does not serve latent attention (MLA)"] if "mla" in need.traits else []


def flashinfer_head_dims(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses head dims for which FlashInfer has no kernels."""
    if need.head_dim != need.v_head_dim:
        return [f"head dims {need.head_dim}/{need.v_head_dim} differ"]
    return [] if need.head_dim in (64, 128, 256) else [f"head dim {need.head_dim} (has 64, 128, 256)"]


def flashinfer_prompts_are_faster(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses prompts for which FlashInfer is not known to be faster than Triton's kernel. On SM12x, by measured and
    predicted times for 8,192 tokens, FA2 takes half of Triton's time with heads of 128 and 256 dims, but 1.3 times as
    long with 64. On Hopper, FA3 was measured with 128 dims only, and takes 16-bit caches only."""
    hopper = "wgmma" in arch.features
    dims = (128,) if hopper else (128, 256)
    faster = f"faster with head dim {' or '.join(map(str, dims))}, not {need.head_dim}"
    reasons = [] if need.head_dim in dims else [faster]
    return reasons + (only_16_bit_cache(need, arch) if hopper else []) + _only_measured_gpus(arch)


def flashinfer_latent_prompts_are_faster(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses latent prompts for which FlashInfer was not measured: heads other than those of DeepSeek-V3 and Kimi K2,
    and GPUs other than SM12x and Hopper."""
    dims = (need.head_dim, need.v_head_dim)
    reasons = [] if dims == (192, 128) else [f"expanded heads of {dims[0]}/{dims[1]} dims (has 192/128)"]
    return reasons + _only_measured_gpus(arch)


def _only_measured_gpus(arch: ArchTraits) -> list[str]:
    """Refuses GPUs other than SM12x and Hopper: FlashInfer was compared with Triton's kernel only there."""
    measured = {"mma_sync_block_scale", "wgmma"} & arch.features
    return [] if measured else ["measured to be faster than Triton's on SM12x and Hopper only"]


def torch_flash_heads(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses heads that torch's flash kernels do not support."""
    if need.head_dim % 8 or need.head_dim > 256:
        return [f"head dim {need.head_dim} (has multiples of 8 up to 256)"]
    return only_equal_head_dims(need, arch)


def torch_flash_is_faster(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses head dims with which Triton's kernel is faster than torch's. With wgmma (H100, 16,384 patches), Triton's
    takes 0.75 to 0.88 of torch's time with the dims listed below, but 1.7 times as long with 72, whose rows are not
    aligned to 32 bytes. On other GPUs, by FA2's measured times on SM12x, Triton's is faster with 64 dims; with more,
    torch's takes half of its time. Triton's has no windows to both sides."""
    if "two_sided_window" in need.traits:
        return []
    faster = (64, 80, 96, 128) if "wgmma" in arch.features else (64,)
    return [f"Triton's is faster with head dim {need.head_dim}"] if need.head_dim in faster else []


def flashinfer_latents(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses latents of sizes that FA2's kernels do not support, and those of windows."""
    latent = (need.head_dim, need.v_head_dim)
    windows = ["latents of windows"] if {"mla", "sliding_window"} <= need.traits else []
    if latent == MLA_LATENT:
        return windows
    return [f"latents of {latent[0]} dims, {latent[1]} of them values (has 576, 512)", *windows]


def only_packed(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses caches other than packed latents: 576 dims, 512 of them values, in e4m3."""
    if need.kv_dtype != "fp8_e4m3":
        return [f"no {need.kv_dtype} cache (has fp8_e4m3 and 16 bits)"]
    latent = (need.head_dim, need.v_head_dim)
    return [] if latent == MLA_LATENT else [f"latents of {latent[0]} dims, {latent[1]} of them values (has 576, 512)"]


def only_16_bit_cache(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses caches whose dtype does not have 16 bits."""
    return [] if need.kv_dtype in ("bfloat16", "float16") else [f"no {need.kv_dtype} cache (has 16 bits)"]


def no_fp4_cache(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses FP4 caches."""
    return ["no fp4_e2m1 cache (has fp8_e4m3, fp8_e5m2, 16 bits)"] if need.kv_dtype == "fp4_e2m1" else []


def only_equal_head_dims(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses heads whose keys and values have different numbers of dims."""
    return [] if need.head_dim == need.v_head_dim else [f"head dims {need.head_dim}/{need.v_head_dim} differ"]


HYBRIDS = {"hybrid_gdn": "gated-delta-net", "hybrid_mamba2": "Mamba-2"}
"""Traits of models with recurrent layers, and the names of these layers."""
HYBRID_LINEAR_ATTN_BACKENDS: tuple[tuple[str, tuple[str, ...], tuple[str, str]], ...] = (
    ("tcgen05", ("hybrid_gdn",), ("triton", "trtllm_mha")),
    ("mma_sync_block_scale", tuple(HYBRIDS), ("triton", "flashinfer")),
)
"""Rows of (GPU feature, traits, backends): on GPUs with the feature, a model with recurrent layers and one of
the traits may have only these backends for its full-attention layers, and torch_native. The first matching row counts;
without one, any backend may serve."""


def hybrid_linear_attn_backend(need: Need, arch: ArchTraits) -> tuple[tuple[str, ...], str] | None:
    """Returns (the attention backends that a hybrid model may have on this GPU, the reason); None if any may serve."""
    for feature, traits, (first, second) in HYBRID_LINEAR_ATTN_BACKENDS:
        for trait in need.traits.intersection(traits):
            if feature in arch.features:
                why = f"hybrid {HYBRIDS[trait]} models take {first} or {second} on GPUs with {feature}"
                return (first, second, "torch_native"), why
    return None


def not_for_hybrids(name: str) -> Refuse:
    """Returns a refusal of hybrid models that may not have the backend `name` on this GPU."""

    def refuse(need: Need, arch: ArchTraits) -> list[str]:
        allowed = hybrid_linear_attn_backend(need, arch)
        return [] if allowed is None or name in allowed[0] else [allowed[1]]

    return refuse


def hybrid_choice(need: Need, arch: ArchTraits) -> str:
    """Returns the remark about the backends of hybrid models; "" if any may serve."""
    allowed = hybrid_linear_attn_backend(need, arch)
    return "" if allowed is None else allowed[1]


def no_e4m3_conversion(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses e4m3 caches on GPUs that cannot multiply e4m3: Triton cannot convert it there, while it converts e5m2
    everywhere."""
    if need.kv_dtype == "fp8_e4m3" and "fp8_mma" not in arch.features:
        return [f"cannot convert fp8_e4m3 on {arch.name} (fp8_e5m2 works)"]
    return []


def e4m3_or_16_bits(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses e5m2 caches: sparse attention stores its entries in e4m3 with scales, or in 16 bits."""
    return ["no fp8_e5m2 cache (has fp8_e4m3, 16 bits)"] if need.kv_dtype == "fp8_e5m2" else []


def packed_latents(need: Need, arch: ArchTraits) -> str:
    """Returns the remark about latents or entries in eight or in four bits; "" for a cache of 16 bits."""
    rotary = "rotary columns in bfloat16"
    if need.kv_dtype == "fp4_e2m1":
        return f"records: e2m1 with a scale for 16 columns, {rotary}"
    if need.kv_dtype != "fp8_e4m3":
        return ""
    if "mla" in need.traits:
        return f"latents of 656 bytes: e4m3 with a scale for 128 columns, {rotary}"
    return f"records: e4m3 with a scale for 64 columns, {rotary}"


def no_e4m3_arithmetic(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses weights or scales in e4m3 on GPUs without e4m3 arithmetic."""
    scheme = SCHEMES.get(need.quant or "")
    if scheme is not None and "e4m3" in (scheme.element, scheme.scale) and "fp8_mma" not in arch.features:
        return [f"no e4m3 arithmetic on {arch.name}, which {need.quant} needs"]
    return []


def dequantized_in_registers(need: Need, arch: ArchTraits) -> str:
    """Returns the remark about weights that are dequantized in registers."""
    return describe_dequantization(SCHEMES[need.quant], arch.features) if need.quant else ""


MIXED_ROWS = 48
"""Least average number of (token, expert) pairs per expert for which sgl-kernel's products serve."""


def mixed_or_dequantized(need: Need, arch: ArchTraits) -> str:
    """Returns the remark about which kernel serves MXFP4 x MXFP8 experts."""
    triton = dequantized_in_registers(need, arch)
    return f"e2m1 times e4m3 as they are, from {MIXED_ROWS} pairs an expert on; for fewer by triton, {triton}"


FEW_MIN_K = 512
"""Fewest columns (K) of a weight that gemv_kernel and skinny_gemm_kernel take. A test checks that this number and the
three below equal the launchers'."""
FEW_MULTIPLE = 16
"""Number that must divide K."""
SKINNY_MIN_N, SKINNY_MAX_ROWS = 2048, 16
"""Fewest rows (N) of a weight, and most tokens of a step, that skinny_gemm_kernel takes."""


def few_rows_or_cublas(need: Need, arch: ArchTraits) -> str:
    """Describes which kernel serves which products of unquantized weights, and why."""
    served: list[str] = []
    left: list[str] = []
    small: list[str] = []
    for rows, cols, bias in need.shapes:
        name = f"{rows}x{cols}{' + bias' * bias}"
        if cols < FEW_MIN_K or cols % FEW_MULTIPLE:
            left.append(name)
        elif rows < SKINNY_MIN_N:
            small.append(name)
        else:
            served.append(name)
    parts = [f"cublas for steps of more than {SKINNY_MAX_ROWS} tokens"]
    if left:
        parts[0] += f", and for all with K below {FEW_MIN_K} or no multiple of {FEW_MULTIPLE}: {', '.join(left)}"
    if served:
        reason = "which read the weight once and begin with it ahead of x"
        parts.append(f"gemv_kernel for one token, skinny_gemm_kernel for more, {reason}: {', '.join(served)}")
    if small:
        parts.append(f"gemv_kernel for one token, else cublas, with N below {SKINNY_MIN_N}: {', '.join(small)}")
    return "; ".join(parts)


SCALED_MM_ROWS = 1024
"""Fewest tokens of a step for which torch's scaled products serve: fewer would not fill their large tiles."""
SCALED_MM_SCHEMES = ("fp8_tensor", "fp8_channel", "fp8_block")
SCALED_MM_FEATURES = WGMMA


def library_fails(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses a library's kernel that failed the check at start-up (`Need.library_problem`)."""
    return [need.library_problem] if need.library_problem else []


def scaled_mm_or_triton(need: Need, arch: ArchTraits) -> str:
    """Describes which kernel serves which products of e4m3 weights."""
    step = 128 if need.quant == "fp8_block" else 16
    odd = [f"{rows}x{cols}" for rows, cols, _ in need.shapes if rows % 16 or cols % step]
    text = f"torch.nn.functional.scaled_mm for steps of {SCALED_MM_ROWS:,} tokens and more, triton for fewer"
    return text + (f" and for sizes that its blocks do not divide: {', '.join(odd)}" if odd else "")


def trellis_tiles(need: Need, arch: ArchTraits) -> str:
    """Returns the remark about weights in EXL3."""
    return "tiles are decoded to float16, in registers where rows are few"


def dequantized(need: Need, arch: ArchTraits) -> str:
    """Returns the remark about weights that are dequantized for each product; "" for unquantized weights."""
    return "weights dequantized for each product; activations stay in 16 bits" if need.quant else ""


def native_fp4_available(need: Need, arch: ArchTraits) -> list[str]:
    """Refuses weight-only kernels for FP4 weights on GPUs that multiply FP4 natively."""
    if need.quant in ("nvfp4", "mxfp4") and "block_scaled_mma" in arch.features:
        return ["weight-only; native FP4 is available"]
    return []


HALF = only_dtypes("bfloat16", "float16")
