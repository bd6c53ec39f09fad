"""Products with EXL3's trellises: y = (((x * suh) H) Wq) H * svh. Reference: `layers.quantization.trellis`.

Four kernels: the transform of inputs, tiles decoded in registers in front of `tl.dot` for few rows, a matrix decoded to
float16 for many, and the transform of outputs, which also adds the parts of a split product.

A lane decodes of each tile the eight weights that it needs as an operand of `mma.m16n8k16`, so that a program of one
warp multiplies them without a detour through shared memory. Triton wants four neighbours of a column in each lane, for
which 16 rows of a tile stand in another order (`_in_tile`), and so do the transformed inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.scaled_dot import INTERPRETED

BLOCK: tl.constexpr = tl.constexpr(128)
LANES: tl.constexpr = tl.constexpr(32)
BLOCK_K: tl.constexpr = tl.constexpr(64)
BLOCK_N: tl.constexpr = tl.constexpr(32)
"""Weights that a program decodes at a time: 4 x 2 tiles, each by all of its lanes. Loads of one dimension leave Triton
no other layout."""
MUL1_SCALE: tl.constexpr = tl.constexpr(0.00676727294921875)
MUL1_OFFSET: tl.constexpr = tl.constexpr(-10.3828125)
"""The float16 factor and summand that turn MUL1's sums of bytes into values; twice 0x1EEE and 0xC931 below."""
VALUES_OF_SUMS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 a, b, scale, offset;"
    " dp4a.u32.u32 a, $1, 0x01010101, 0x6400; dp4a.u32.u32 b, $2, 0x01010101, 0x6400; prmt.b32 a, a, b, 0x5410;"
    " mov.b32 scale, 0x1EEE1EEE; mov.b32 offset, 0xC931C931; fma.rn.f16x2 $0, a, scale, offset; }"
)
VALUES_OF_HALVES: tl.constexpr = tl.constexpr(
    "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x5410; prmt.b32 high, $1, $2, 0x7632; add.rn.f16x2 $0, low, high; }"
)
"""Two products of states -> two values in one register, as the operand of a product has them."""


@triton.jit
def _values(states, multiplier, summand, MUL1: tl.constexpr):
    """States uint32 -> values float16 of the codebook MUL1, or of one of those that add two halves."""
    product = states * multiplier.to(tl.uint32) + summand.to(tl.uint32)
    if MUL1:
        # 0x6400 plus an integer below 1,024 is the float16 of 1,024 plus it.
        if INTERPRETED:
            pairs = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
            bits = (pairs & 0xFFFF) + (pairs >> 16) + 0x6400
            total = bits.to(tl.uint16).to(tl.float16, bitcast=True)
            return (total.to(tl.float32) * MUL1_SCALE + MUL1_OFFSET).to(tl.float16)  # exact but for the last rounding
        else:
            return tl.inline_asm_elementwise(
                VALUES_OF_SUMS, "=r,r,r", [product], dtype=tl.float16, is_pure=True, pack=2
            )
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    if INTERPRETED:
        low = (mixed & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (mixed >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low + high
    else:
        return tl.inline_asm_elementwise(VALUES_OF_HALVES, "=r,r,r", [mixed], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _shifted(high, low, by):
    """The upper 32 bits of 64, shifted to the left by 0 to 31."""
    if INTERPRETED:
        both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        return (both >> (32 - by).to(tl.uint64)).to(tl.uint32)
    else:
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, by], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _state(first, second, third, POSITION: tl.constexpr, HALF_BITS: tl.constexpr):
    """The state of a lane's position, uint32: 16 bits of its three words, whose first bit begins position 0."""
    # Lanes begin at even positions, so that halves of bits do not add up.
    begin: tl.constexpr = (POSITION + 1) * HALF_BITS // 2 - HALF_BITS // 2
    at: tl.constexpr = begin % 32
    high, low = first, second
    if begin >= 64:
        high, low = third, third
    elif begin >= 32:
        high, low = second, third
    if at <= 16:
        return (high >> (16 - at)) & 0xFFFF
    else:
        return ((high << at) | (low >> (32 - at))) >> 16


@triton.jit
def _four(at, row_words):
    """Words [LANES, 2, 2] of four tiles in a column of tiles."""
    even = tl.join(tl.load(at), tl.load(at + 2 * row_words))
    odd = tl.join(tl.load(at + row_words), tl.load(at + 3 * row_words))
    return tl.join(even, odd)


@triton.jit
def _words(tiles, word, AHEAD: tl.constexpr, row_words, WORDS: tl.constexpr):
    """The lanes' words, AHEAD behind their first in the ring of a tile: uint32 [LANES, 2, 2, 2] of 4 x 2 tiles."""
    place = word + AHEAD
    at = tiles + tl.where(place >= WORDS, place - WORDS, place)
    return tl.join(_four(at, row_words), _four(at + WORDS, row_words)).to(tl.uint32, bitcast=True)


@triton.jit
def decoded(tiles, first_k, first_n, tiles_n, multiplier, summand, HALF_BITS: tl.constexpr, MUL1: tl.constexpr):
    """Weights float16 [BLOCK_K, BLOCK_N], from tile (first_k, first_n) on, rows in the order of `_in_tile`.
    tiles: int32 [k, tiles_n, words] with HALF_BITS / 2 bits a weight."""
    words: tl.constexpr = 4 * HALF_BITS
    lane = tl.arange(0, LANES)
    # The state of a lane's first position ends behind its first symbol: it begins 16 bits before, in the ring.
    bit = lane * words + HALF_BITS // 2 - 16
    bit = tl.where(bit < 0, bit + 32 * words, bit)
    word, by = bit // 32, (bit % 32)[:, None, None, None]
    # A lane's states have `bits` bits in all, which begin at most `late` bits behind a word's first.
    bits: tl.constexpr = 8 * HALF_BITS // 2 - HALF_BITS // 2 + 16
    step: tl.constexpr = 32 if HALF_BITS % 8 == 0 else 16 if HALF_BITS % 4 == 0 else 8 if HALF_BITS % 2 == 0 else 4
    late: tl.constexpr = (HALF_BITS // 2 + 16) % step + 32 - step
    row_words = tiles_n * words
    tiles += first_k * row_words.to(tl.int64) + first_n * words
    one = _words(tiles, word, 0, row_words, words)
    two, three, four = one, one, one
    if late + bits > 32:
        two = _words(tiles, word, 1, row_words, words)
    if late + bits > 64:
        three = _words(tiles, word, 2, row_words, words)
    if late + bits > 96:
        four = _words(tiles, word, 3, row_words, words)
    first, second, third = _shifted(one, two, by), one, one
    if bits > 32:
        second = _shifted(two, three, by)
    if bits > 64:
        third = _shifted(three, four, by)
    s0 = _state(first, second, third, 0, HALF_BITS)
    s1 = _state(first, second, third, 1, HALF_BITS)
    s2 = _state(first, second, third, 2, HALF_BITS)
    s3 = _state(first, second, third, 3, HALF_BITS)
    s4 = _state(first, second, third, 4, HALF_BITS)
    s5 = _state(first, second, third, 5, HALF_BITS)
    s6 = _state(first, second, third, 6, HALF_BITS)
    s7 = _state(first, second, third, 7, HALF_BITS)
    even = tl.join(tl.join(s0, s4), tl.join(s2, s6))
    odd = tl.join(tl.join(s1, s5), tl.join(s3, s7))
    # Neighbours in registers are neighbours in a column.
    each = _values(tl.join(even, odd), multiplier, summand, MUL1)
    # [lane / 4, lane % 4, k / 2, k % 2, n, item / 4, item / 2 % 2, item % 2]. A tile's rows are 4 (lane % 4) + item % 4
    # here and 8 (item / 2 % 2) + 2 (lane % 4) + item % 2 in the file; its columns are 8 (item / 4) + lane / 4.
    each = tl.reshape(each, (8, 4, 2, 2, 2, 2, 2, 2))
    each = tl.permute(each, (2, 3, 1, 6, 7, 4, 5, 0))
    return tl.reshape(each, (BLOCK_K, BLOCK_N))


@triton.jit
def _in_tile(row):
    """The row of the file's matrix that stands in a row of `decoded`."""
    return (row & -16) | ((row & 2) << 2) | ((row & 12) >> 1) | (row & 1)


@triton.jit
def hadamard(rows, cols):
    """Signs of the transform, float16 [rows, cols]: the parity of the bits that row and column share."""
    shared = rows[:, None] & cols[None, :]
    parity = (0x6996 >> ((shared ^ (shared >> 4)) & 15)) & 1
    return (0x3C00 | (parity << 15)).to(tl.uint16).to(tl.float16, bitcast=True)


ROOT: tl.constexpr = tl.constexpr(0.08838834764831845)
"""1 / sqrt(128)."""
LARGEST: tl.constexpr = tl.constexpr(65504.0)


@triton.jit(do_not_specialize=["T", "K", "x_stride", "per_row"])
def transform_inputs_kernel(
    x,  # [T, K]; ROUTED: [T / per_row, K]
    suh,  # float16 [modules, PADDED]; ROUTED: [experts, PADDED]
    experts,  # ROUTED: int32 [T]
    out,  # float16 [modules, T, PADDED], columns in the order of `_in_tile`
    T,
    K,
    PADDED,
    x_stride,
    per_row,
    BLOCK_M: tl.constexpr,
    ROUTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows times their scales, transformed: a block of columns for one module, or (ROUTED) each row for its expert."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    module = tl.program_id(2).to(tl.int64)
    there = rows < T
    in_block = tl.arange(0, BLOCK)
    signs = hadamard(in_block, _in_tile(in_block))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROUTED:
        expert = tl.maximum(tl.load(experts + rows, mask=there, other=0), 0).to(tl.int64)
        scale = tl.load(suh + expert[:, None] * PADDED + cols[None, :]).to(tl.float32)
        source = rows // per_row
    else:
        scale = tl.load(suh + module * PADDED + cols).to(tl.float32)[None, :]
        source = rows
    at = x + source[:, None].to(tl.int64) * x_stride + cols[None, :]
    values = tl.load(at, mask=there[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32) * scale
    values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST).to(tl.float16)
    mixed = tl.dot(values, signs) * ROOT
    mixed = tl.minimum(tl.maximum(mixed, -LARGEST), LARGEST)
    to = out + (module * T + rows[:, None]) * PADDED + cols[None, :]
    tl.store(to, mixed.to(tl.float16), mask=there[:, None])


@triton.jit(do_not_specialize=["T", "tiles_n", "expert_words", "multiplier", "summand"])
def product_kernel(
    x,  # float16 [T, K], transformed, columns in the order of `_in_tile`
    tiles,  # int32 [K / 16, tiles_n, words]; ROUTED: of each expert
    out,  # [splits, T, columns]
    sorted_rows,  # ROUTED: int32, rows by expert in blocks of BLOCK_M
    block_expert,  # ROUTED: int32, the expert of each block
    num_blocks,  # ROUTED: int32 [1]
    T,
    K,
    tiles_n,
    columns,
    first_column,
    chunk,
    expert_words,
    multiplier,
    summand,
    BLOCK_M: tl.constexpr,
    HALF_BITS: tl.constexpr,
    MUL1: tl.constexpr,
    ROUTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of all rows, of which there are BLOCK_M at most, over `chunk` columns of x; ROUTED: of a block of
    rows that have one expert."""
    n, block = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, split = block * chunk, block
    rows = tl.arange(0, BLOCK_M)
    if ROUTED:
        begin, split = 0, 0
        if block >= tl.load(num_blocks):
            return
        rows = tl.load(sorted_rows + block * BLOCK_M + rows)
        tiles += tl.load(block_expert + block).to(tl.int64) * expert_words
    k = tl.arange(0, BLOCK_K)
    there = (rows < T)[:, None]
    x_at = x + rows[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, min(begin + chunk, K), BLOCK_K):
        weight = decoded(tiles, start // 16, n * (BLOCK_N // 16), tiles_n, multiplier, summand, HALF_BITS, MUL1)
        # The ledger's rows have bfloat16 in the place of every 16-bit type.
        total = tl.dot(tl.load(x_at + start, mask=there, other=0.0).to(tl.float16), weight, total)
    cols = first_column + n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + (split * T + rows[:, None]).to(tl.int64) * columns + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tiles_n", "first_tile", "multiplier", "summand"])
def decode_kernel(
    tiles,  # int32 [K / 16, tiles_n, words]
    out,  # float16 [K, columns], rows in the order of `_in_tile`
    tiles_n,
    columns,
    first_tile,
    multiplier,
    summand,
    HALF_BITS: tl.constexpr,
    MUL1: tl.constexpr,
):
    """Weights [BLOCK_K, BLOCK_N]; columns of `out` begin with tile `first_tile`."""
    n, k = tl.program_id(0), tl.program_id(1)
    first_n = first_tile + n * (BLOCK_N // 16)
    weight = decoded(tiles, k * (BLOCK_K // 16), first_n, tiles_n, multiplier, summand, HALF_BITS, MUL1)
    rows, cols = k * BLOCK_K + tl.arange(0, BLOCK_K), n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + rows[:, None].to(tl.int64) * columns + cols[None, :], weight)


@triton.jit(do_not_specialize=["T", "N", "splits"])
def transform_outputs_kernel(
    parts,  # [splits, T, columns]
    svh,  # float16 [columns]; ROUTED: [experts, columns]
    experts,  # ROUTED: int32 [T]
    places,  # int32 [blocks, 3]: where a block's first column goes, and the output columns that are its module's
    bias,  # HAS_BIAS: [N]
    out,  # [T, N]
    T,
    N,
    columns,
    splits,
    BLOCK_M: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROUTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of parts, AT_ONCE of which are loaded at once, transformed, times their scales: a block of columns."""
    block = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    there = rows < T
    place = tl.load(places + 3 * block)
    begin, end = tl.load(places + 3 * block + 1), tl.load(places + 3 * block + 2)
    to = place + tl.arange(0, BLOCK)
    wanted = (to >= begin) & (to < end)
    in_block = tl.arange(0, BLOCK)
    signs = hadamard(in_block, in_block).to(tl.bfloat16)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROUTED:
        expert = tl.maximum(tl.load(experts + rows, mask=there, other=0), 0).to(tl.int64)
        scale = tl.load(svh + expert[:, None] * columns + cols[None, :]).to(tl.float32)
    else:
        scale = tl.load(svh + cols).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for first in range(0, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            split = first + i
            at = (split * T + rows[:, None]).to(tl.int64) * columns + cols[None, :]
            total += tl.load(parts + at, mask=there[:, None] & (split < splits), other=0.0).to(tl.float32)
    # Twice eight bits of the sums; a third product would add what results in 16 bits do not show.
    high = total.to(tl.bfloat16)
    mixed = tl.dot((total - high.to(tl.float32)).to(tl.bfloat16), signs)
    mixed = tl.dot(high, signs, mixed) * ROOT * scale
    if HAS_BIAS:
        mixed += tl.load(bias + to, mask=wanted, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows[:, None].to(tl.int64) * N + to[None, :], mixed.to(out.dtype.element_ty),
        mask=there[:, None] & wanted[None, :],
    )  # fmt: skip
