"""Products with EXL3's trellises: y = (((x * suh) H) Wq) H * svh. Reference: `layers.quantization.trellis`.

Four kernels: the transform of inputs, tiles decoded in registers in front of `tl.dot` for few rows, a matrix decoded to
float16 for many, and the transform of outputs, which also adds the parts of a split product. A lane's eight weights of
a tile end in 7 K + 16 neighbouring bits, which are four words at most: these are loaded once and shifted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.scaled_dot import INTERPRETED

BLOCK: tl.constexpr = tl.constexpr(128)
LANES: tl.constexpr = tl.constexpr(32)
MUL1_SCALE: tl.constexpr = tl.constexpr(0.00676727294921875)
MUL1_OFFSET: tl.constexpr = tl.constexpr(-10.3828125)
"""The float16 factor and summand that turn MUL1's sums of bytes into values."""


@triton.jit
def _value(state, multiplier, summand, MUL1: tl.constexpr):
    """States uint32 -> values float16 of the codebook MUL1, or of one of those that add two halves."""
    product = state * multiplier.to(tl.uint32) + summand.to(tl.uint32)
    if MUL1:
        # 0x6400 plus an integer below 1,024 is the float16 of 1,024 plus it.
        if INTERPRETED:
            pairs = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
            bits = (pairs & 0xFFFF) + (pairs >> 16) + 0x6400
            total = bits.to(tl.uint16).to(tl.float16, bitcast=True)
            return (total.to(tl.float32) * MUL1_SCALE + MUL1_OFFSET).to(tl.float16)  # exact but for the last rounding
        else:
            bits = tl.inline_asm_elementwise(
                "dp4a.u32.u32 $0, $1, 0x01010101, 0x6400;", "=r,r", [product], dtype=tl.uint32, is_pure=True, pack=1
            )
            total = bits.to(tl.uint16).to(tl.float16, bitcast=True)
            scale, offset = tl.full(total.shape, MUL1_SCALE, tl.float16), tl.full(total.shape, MUL1_OFFSET, tl.float16)
            return tl.fma(total, scale, offset)
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    low = (mixed & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (mixed >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low + high


@triton.jit
def _state(j: tl.constexpr, at, one, two, three, four, half_bits, FOUR_BITS: tl.constexpr):
    """The state of a lane's position j, uint32. `at` is the bit of the lane's words where that of position 0 begins."""
    if FOUR_BITS:  # in every lane at bit 20
        first: tl.constexpr = 20 + 4 * j
        if first > 32:
            state = two >> (48 - first)
        else:
            state = (one << (first - 16)) | (two >> (48 - first))
        return state & 0xFFFF
    else:
        # Lanes begin at even positions, so that halves of bits do not add up.
        place = at + ((j + 1) * half_bits // 2 - half_bits // 2)
        high = tl.where(place < 32, one, tl.where(place < 64, two, three)).to(tl.uint64)
        low = tl.where(place < 32, two, tl.where(place < 64, three, four)).to(tl.uint64)
        return (((high << 32) | low) >> (48 - place % 32).to(tl.uint64)).to(tl.uint32) & 0xFFFF


@triton.jit
def _words(tiles, word, ahead: tl.constexpr, words):
    """The lanes' words, `ahead` behind their first, in the ring of a tile."""
    place = word + ahead
    return tl.load(tiles + tl.where(place >= words, place - words, place)[None, None, :]).to(tl.uint32, bitcast=True)


@triton.jit
def decoded(
    tiles,
    first_k,
    first_n,
    tiles_n,
    half_bits,
    multiplier,
    summand,
    K_TILES: tl.constexpr,
    N_TILES: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    MUL1: tl.constexpr,
):
    """Weights float16 [16 K_TILES, 16 N_TILES], from tile (first_k, first_n) on. tiles: int32 [k, tiles_n, words] with
    half_bits / 2 bits a weight."""
    if FOUR_BITS:
        half_bits = 8
    words = 4 * half_bits
    k, n, lane = tl.arange(0, K_TILES), tl.arange(0, N_TILES), tl.arange(0, LANES)
    base = ((first_k + k)[:, None] * tiles_n + (first_n + n)[None, :]).to(tl.int64) * words
    # The state of a lane's first position ends behind its first symbol: it begins 16 bits before, in the ring.
    bit = lane * words + half_bits // 2 - 16
    bit = tl.where(bit < 0, bit + 32 * words, bit)
    word, at = bit // 32, (bit % 32)[None, None, :]
    from_tile = tiles + base[:, :, None]
    one, two = _words(from_tile, word, 0, words), _words(from_tile, word, 1, words)
    three, four = two, two
    if not FOUR_BITS:
        three, four = _words(from_tile, word, 2, words), _words(from_tile, word, 3, words)
    v0 = _value(_state(0, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v1 = _value(_state(1, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v2 = _value(_state(2, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v3 = _value(_state(3, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v4 = _value(_state(4, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v5 = _value(_state(5, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v6 = _value(_state(6, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    v7 = _value(_state(7, at, one, two, three, four, half_bits, FOUR_BITS), multiplier, summand, MUL1)
    left = tl.join(tl.join(v0, v1), tl.join(v2, v3))
    right = tl.join(tl.join(v4, v5), tl.join(v6, v7))
    # [k, n, lane / 4, lane % 4, item % 2, item / 2 % 2, item / 4]: rows are 8 (item / 2 % 2) + 2 (lane % 4) + item % 2,
    # columns 8 (item / 4) + lane / 4.
    each = tl.reshape(tl.join(left, right), (K_TILES, N_TILES, 8, 4, 2, 2, 2))
    each = tl.permute(each, (0, 5, 3, 4, 1, 6, 2))
    return tl.reshape(each, (16 * K_TILES, 16 * N_TILES))


@triton.jit
def hadamard():
    """Signs of the transform, float16 [128, 128]: the parity of the bits that row and column share."""
    index = tl.arange(0, BLOCK)
    shared = index[:, None] & index[None, :]
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
    out,  # float16 [modules, T, PADDED]
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
    signs = hadamard()
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


@triton.jit(do_not_specialize=["T", "tiles_n", "expert_words", "half_bits", "multiplier", "summand"])
def product_kernel(
    x,  # float16 [T, K], transformed
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
    half_bits,
    multiplier,
    summand,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FOUR_BITS: tl.constexpr,
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
        weight = decoded(
            tiles, start // 16, n * (BLOCK_N // 16), tiles_n, half_bits, multiplier, summand, BLOCK_K // 16,
            BLOCK_N // 16, FOUR_BITS, MUL1,
        )  # fmt: skip
        # The ledger's rows have bfloat16 in the place of every 16-bit type.
        total = tl.dot(tl.load(x_at + start, mask=there, other=0.0).to(tl.float16), weight, total)
    cols = first_column + n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + (split * T + rows[:, None]).to(tl.int64) * columns + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tiles_n", "first_tile", "half_bits", "multiplier", "summand"])
def decode_kernel(
    tiles,  # int32 [K / 16, tiles_n, words]
    out,  # float16 [K, columns]
    tiles_n,
    columns,
    first_tile,
    half_bits,
    multiplier,
    summand,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    MUL1: tl.constexpr,
):
    """Weights [BLOCK_K, BLOCK_N]; columns of `out` begin with tile `first_tile`."""
    n, k = tl.program_id(0), tl.program_id(1)
    weight = decoded(
        tiles, k * (BLOCK_K // 16), first_tile + n * (BLOCK_N // 16), tiles_n, half_bits, multiplier, summand,
        BLOCK_K // 16, BLOCK_N // 16, FOUR_BITS, MUL1,
    )  # fmt: skip
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
    ROUTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of parts, transformed, times their scales: a block of columns."""
    block = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    there = rows < T
    place = tl.load(places + 3 * block)
    begin, end = tl.load(places + 3 * block + 1), tl.load(places + 3 * block + 2)
    to = place + tl.arange(0, BLOCK)
    wanted = (to >= begin) & (to < end)
    signs = hadamard().to(tl.bfloat16)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROUTED:
        expert = tl.maximum(tl.load(experts + rows, mask=there, other=0), 0).to(tl.int64)
        scale = tl.load(svh + expert[:, None] * columns + cols[None, :]).to(tl.float32)
    else:
        scale = tl.load(svh + cols).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for split in range(splits):
        at = (split * T + rows[:, None]).to(tl.int64) * columns + cols[None, :]
        total += tl.load(parts + at, mask=there[:, None], other=0.0).to(tl.float32)
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
