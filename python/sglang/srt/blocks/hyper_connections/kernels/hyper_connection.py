"""Hyper-connections from one block of a model to the next, in two launches. Reference: `reference.hyper_connection`.

The first one mixes the streams and multiplies them by the connection's matrix, in parts of a token's columns, each of
which leaves its sums in fp32. Of few tokens a program has one block of one stream, for which it reads all streams; of
many it has all streams of its columns, so that each number is read once. The second one adds the parts in a fixed order
and makes the next block's input of them, while other programs of it make the placement: the rounds of the normalization
are a chain that nobody waits for.
Streams of 16 bits are multiplied by fp32 numbers without losing digits: a number of the matrix is the sum of three in
bfloat16, whose products the matrix unit adds in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

FEW_TOKENS = 64
"""Tokens up to which each program has one block of one stream, so that the matrix is read by as many as can be."""
FEW_TILE = {"BLOCK_T": 16, "BLOCK_H": 64, "num_warps": 4}
MANY_TILE = {"BLOCK_T": 64, "BLOCK_H": 32, "num_warps": 8, "num_stages": 3}
SPLITS_UP_TO = ((256, 32), (1 << 62, 16))
"""Of more than FEW_TOKENS: (tokens of a step, parts of a token's columns). Hopper's matrix unit cuts digits off with
every addition: fewer parts would be as fast, but less exact."""


@triton.jit
def _matrix_part(matrix, outputs, stream, h, size, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr):
    """[len(outputs), len(h)]: the columns h of a stream."""
    at = outputs[:, None].to(tl.int64) * (STREAMS * size) + stream * size + h[None, :]
    return tl.load(matrix + at, mask=(outputs < OUTPUTS)[:, None] & (h < size)[None, :], other=0.0)


@triton.jit
def _add_products(products, x, weight):
    """products + x @ weight^T, where a number of `weight` is the sum of three in bfloat16."""
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    products = tl.dot(x, tl.trans(high), products)
    products = tl.dot(x, tl.trans(middle), products)
    return tl.dot(x, tl.trans(low), products)


@triton.jit
def _store_sums(sums, products, squares, token, split, splits, is_token, outputs, OUTPUTS: tl.constexpr):
    square = tl.sum(squares, axis=1)
    all_sums = tl.where((outputs == OUTPUTS)[None, :], square[:, None], products)
    rows = sums + (token * splits + split)[:, None] * outputs.shape[0]
    tl.store(rows + outputs[None, :], all_sums, mask=is_token[:, None])


@triton.jit
def mix_streams_kernel(
    streams,  # [T, STREAMS, size]
    out,  # [T, size]
    placement,  # [T, STREAMS + STREAMS * STREAMS] fp32, or [T, STREAMS]: the streams do not mix
    matrix,  # [OUTPUTS, STREAMS * size] fp32
    mixed,  # [T, STREAMS, size]
    sums,  # [T, splits, COLS] fp32: products with the rows of the matrix, then squares
    num_tokens,
    size,
    HAS_OUT: tl.constexpr,  # False: the streams stay as they are
    PLACES: tl.constexpr,  # columns of the placement
    STREAMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """For few tokens: program (tokens, block of columns of one stream)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    block = tl.program_id(1)
    is_token = token < num_tokens
    outputs = tl.arange(0, COLS)
    stream = block % STREAMS
    h = (block // STREAMS) * BLOCK_H + tl.arange(0, BLOCK_H)
    # The matrix does not wait for the streams, so its load is issued first.
    weight = _matrix_part(matrix, outputs, stream, h, size, STREAMS, OUTPUTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mask = is_token[:, None] & (h < size)[None, :]
    source = streams + token[:, None] * (STREAMS * size) + h[None, :]
    if HAS_OUT:
        place = placement + token * PLACES
        share = tl.load(place + stream, mask=is_token, other=0.0)
        output = tl.load(out + token[:, None] * size + h[None, :], mask=mask, other=0.0).to(tl.float32)
        total = share[:, None] * output
        if PLACES == STREAMS:
            total += tl.load(source + stream * size, mask=mask, other=0.0).to(tl.float32)
        else:
            for other in tl.static_range(STREAMS):
                share = tl.load(place + STREAMS + other * STREAMS + stream, mask=is_token, other=0.0)
                total += share[:, None] * tl.load(source + other * size, mask=mask, other=0.0).to(tl.float32)
        x = total.to(streams.dtype.element_ty)
        tl.store(mixed + token[:, None] * (STREAMS * size) + stream * size + h[None, :], x, mask=mask)
    else:
        x = tl.load(source + stream * size, mask=mask, other=0.0)
    products = _add_products(tl.zeros((BLOCK_T, COLS), tl.float32), x, weight)
    squares = x.to(tl.float32) * x.to(tl.float32)
    _store_sums(sums, products, squares, token, block, tl.num_programs(1), is_token, outputs, OUTPUTS)


@triton.jit
def mix_all_streams_kernel(
    streams, out, placement, matrix, mixed, sums, num_tokens, size, steps, HAS_OUT: tl.constexpr, PLACES: tl.constexpr,
    STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, COLS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `mix_streams_kernel`, for many tokens: program (tokens, split) walks over `steps` blocks of columns, with all
    streams of a block at once, so that each number is read once."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    is_token = token < num_tokens
    outputs = tl.arange(0, COLS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    products = tl.zeros((BLOCK_T, COLS), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    shares = ()
    if HAS_OUT:
        place = placement + token * PLACES
        for at in tl.static_range(STREAMS if PLACES == STREAMS else STREAMS + STREAMS * STREAMS):
            shares = shares + (tl.load(place + at, mask=is_token, other=0.0),)  # type: ignore[assignment]
    for step in range(steps):
        h = (split * steps + step) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = is_token[:, None] & (h < size)[None, :]
        source = streams + token[:, None] * (STREAMS * size) + h[None, :]
        target = mixed + token[:, None] * (STREAMS * size) + h[None, :]
        tiles = ()
        for stream in tl.static_range(STREAMS):
            tiles = tiles + (tl.load(source + stream * size, mask=mask, other=0.0),)  # type: ignore[assignment]
        if HAS_OUT:
            output = tl.load(out + token[:, None] * size + h[None, :], mask=mask, other=0.0).to(tl.float32)
        for stream in tl.static_range(STREAMS):
            if HAS_OUT:
                total = shares[stream][:, None] * output
                if PLACES == STREAMS:
                    total += tiles[stream].to(tl.float32)
                else:
                    for other in tl.static_range(STREAMS):
                        total += shares[STREAMS + other * STREAMS + stream][:, None] * tiles[other].to(tl.float32)
                x = total.to(streams.dtype.element_ty)
                tl.store(target + stream * size, x, mask=mask)
            else:
                x = tiles[stream]
            squares += x.to(tl.float32) * x.to(tl.float32)
            weight = _matrix_part(matrix, outputs, stream, h, size, STREAMS, OUTPUTS)
            products = _add_products(products, x, weight)
    _store_sums(sums, products, squares, token, split, tl.num_programs(1), is_token, outputs, OUTPUTS)


@triton.jit
def _input_of_token(
    streams, before, sums, base, scale, weight, x, token, size, num_splits, eps, mix_eps, LAGGED: tl.constexpr,
    HAS_BEFORE: tl.constexpr, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of a token's streams by their weights, normed."""
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    stream = tl.arange(0, STREAMS)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    norm_weight = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    bias = tl.load(base + stream)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = streams + token * (STREAMS * size)
    values = tl.load(rows + stream[:, None] * size + cols[None, :], mask=inside[None, :], other=0.0)
    if LAGGED:
        BEHIND: tl.constexpr = STREAMS + STREAMS * STREAMS
        shares = tl.where(stream == 0, 1.0, 0.0)
        if HAS_BEFORE:
            shares = tl.load(before + token * (BEHIND + STREAMS) + BEHIND + stream)
    else:
        part = sums + (token * num_splits + split) * COLS
        logits = tl.sum(tl.load(part[:, None] + stream[None, :], mask=is_split[:, None], other=0.0), axis=0)
        square = tl.sum(tl.load(part + OUTPUTS, mask=is_split, other=0.0), axis=0)
        logits = logits * tl.rsqrt(square / (STREAMS * size) + eps)
        shares = tl.sigmoid(logits * factor + bias) + mix_eps
    dtype: tl.constexpr = x.dtype.element_ty
    # The norm sees the sum in the model's type.
    joined = tl.sum(shares[:, None] * values.to(tl.float32), axis=0).to(dtype).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(joined * joined) / size + eps)
    tl.store(x + token * size + cols, (joined * inverse * norm_weight).to(dtype), mask=inside)


@triton.jit
def _placement_of_tokens(
    sums, base, scale, placement, token, num_tokens, size, num_splits, eps, mix_eps, rounds, LAGGED: tl.constexpr,
    STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
    MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """How the next block's output and the streams of the tokens [TOKENS] mix."""
    APART: tl.constexpr = OUTPUTS == 2 * STREAMS
    split = tl.arange(0, SPLITS)
    stream = tl.arange(0, STREAMS)
    cell = stream[:, None] * STREAMS + stream[None, :]
    factor = tl.load(scale + 1)
    bias = tl.load(base + STREAMS + stream)
    if not APART:
        mix_factor = tl.load(scale + 2)
        mix_bias = tl.load(base + 2 * STREAMS + cell)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_token = token < num_tokens
    part = sums + (token[None, :] * num_splits + split[:, None]) * COLS
    mask = (split < num_splits)[:, None] & is_token[None, :]
    square = tl.sum(tl.load(part + OUTPUTS, mask=mask, other=0.0), axis=0)
    inverse = tl.rsqrt(square / (STREAMS * size) + eps)
    products = tl.load(part[:, :, None] + STREAMS + stream[None, None, :], mask=mask[:, :, None], other=0.0)
    to_streams = tl.sum(products, axis=0) * inverse[:, None] * factor + bias[None, :]
    PLACES: tl.constexpr = STREAMS if APART else STREAMS + STREAMS * STREAMS + (STREAMS if LAGGED else 0)
    row = placement + token * PLACES
    shares = MAGNITUDE * tl.sigmoid(to_streams)
    if APART:
        shares += mix_eps
    tl.store(row[:, None] + stream[None, :], shares, mask=is_token[:, None])
    if not APART:
        at = part[:, :, None, None] + 2 * STREAMS + cell[None, None, :, :]
        mix = tl.sum(tl.load(at, mask=mask[:, :, None, None], other=0.0), axis=0)
        mix = mix * inverse[:, None, None] * mix_factor + mix_bias[None, :, :]
        mix = tl.exp(mix - tl.max(mix, axis=2, keep_dims=True))
        mix = mix / tl.sum(mix, axis=2, keep_dims=True) + mix_eps
        mix = mix / (tl.sum(mix, axis=1, keep_dims=True) + mix_eps)
        for _ in range(1, rounds):
            mix = mix / (tl.sum(mix, axis=2, keep_dims=True) + mix_eps)
            mix = mix / (tl.sum(mix, axis=1, keep_dims=True) + mix_eps)
        tl.store(row[:, None, None] + STREAMS + cell[None, :, :], mix, mask=is_token[:, None, None])
        if LAGGED:
            products = tl.load(part[:, :, None] + stream[None, None, :], mask=mask[:, :, None], other=0.0)
            of_input = tl.sum(products, axis=0) * inverse[:, None] * tl.load(scale) + tl.load(base + stream)[None, :]
            at_end = row[:, None] + STREAMS + STREAMS * STREAMS + stream[None, :]
            tl.store(at_end, tl.sigmoid(of_input) + mix_eps, mask=is_token[:, None])


@triton.jit
def join_streams_kernel(
    streams,  # [T, STREAMS, size]
    before,  # LAGGED and HAS_BEFORE: [T, STREAMS + STREAMS * STREAMS + STREAMS] fp32, the placement before
    sums,  # [T, num_splits, COLS] fp32
    base,  # [OUTPUTS] fp32
    scale,  # [3] fp32, [2] of streams that do not mix, or [1] without MIX
    weight,  # [size]
    x,  # [T, size]
    placement,  # MIX: [T, STREAMS + STREAMS * STREAMS] fp32, and STREAMS more of LAGGED; [T, STREAMS] without mixing
    num_tokens,
    size,
    num_splits,
    eps,
    mix_eps,
    rounds,
    MIX: tl.constexpr,
    LAGGED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    STREAMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    MAGNITUDE: tl.constexpr,
):
    """The first programs make the placement of TOKENS tokens each (with MIX), the others the input of one."""
    program = tl.program_id(0).to(tl.int64)
    num_mixing = 0
    if MIX:
        num_mixing = tl.cdiv(num_tokens, TOKENS)
    if program >= num_mixing:
        _input_of_token(
            streams, before, sums, base, scale, weight, x, program - num_mixing, size, num_splits, eps, mix_eps,
            LAGGED, HAS_BEFORE, STREAMS, OUTPUTS, COLS, BLOCK, SPLITS, PDL,
        )  # fmt: skip
    elif MIX:
        _placement_of_tokens(
            sums, base, scale, placement, program * TOKENS + tl.arange(0, TOKENS), num_tokens, size, num_splits, eps,
            mix_eps, rounds, LAGGED, STREAMS, OUTPUTS, COLS, SPLITS, PDL, MAGNITUDE,
        )  # fmt: skip


def mix_tile(num_tokens: int) -> dict[str, int]:
    """Returns the tile for this number of tokens."""
    return FEW_TILE if num_tokens <= FEW_TOKENS else MANY_TILE


def columns_of_sums(outputs: int) -> int:
    """Returns the number of columns of `sums`, the least that the matrix unit takes or more."""
    return max(16, triton.next_power_of_2(outputs + 1))


def split_counts(num_tokens: int, streams: int, size: int) -> tuple[int, int]:
    """Returns (parts of a token's columns, blocks of a part). The only block of a part of few tokens is of one stream;
    those of many tokens are of all streams."""
    blocks = triton.cdiv(size, mix_tile(num_tokens)["BLOCK_H"])
    if num_tokens <= FEW_TOKENS:
        return streams * blocks, 1
    splits = next(splits for most, splits in SPLITS_UP_TO if num_tokens <= most)
    steps = triton.cdiv(blocks, splits)
    return triton.cdiv(blocks, steps), steps


def join_launch(num_splits: int, size: int) -> dict[str, int]:
    """Returns block sizes and warps of `join_streams_kernel`: the parts of TOKENS tokens fit into registers."""
    block, splits = triton.next_power_of_2(size), max(8, triton.next_power_of_2(num_splits))
    warps = min(16, max(4, block // 512))
    return {"BLOCK": block, "SPLITS": splits, "TOKENS": max(1, 128 // splits), "num_warps": warps}


def hyper_connection(
    streams: torch.Tensor,
    out: torch.Tensor | None,
    placement: torch.Tensor | None,
    matrix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    mix_eps: float,
    rounds: int,
    lagged: bool = False,
    magnitude: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does as the reference, for streams [T, N, H] in bfloat16, contiguous, N a power of two."""
    num_tokens, num, size = streams.shape
    outputs = matrix.shape[0]
    mix = outputs > num
    mixed = streams if out is None else torch.empty_like(streams)
    x = torch.empty((num_tokens, size), dtype=streams.dtype, device=streams.device)
    width = num + num * num + (num if lagged else 0) if mix else 0
    width = num if outputs == 2 * num else width
    following = torch.empty((num_tokens, width), dtype=torch.float32, device=streams.device)
    if num_tokens == 0:
        return mixed, x, following
    splits, steps = split_counts(num_tokens, num, size)
    tile, cols = mix_tile(num_tokens), columns_of_sums(outputs)
    sums = torch.empty((num_tokens, splits, cols), dtype=torch.float32, device=streams.device)
    args = (
        streams, streams if out is None else out, sums if placement is None else placement, matrix, mixed, sums,
        num_tokens, size,
    )  # fmt: skip
    places = 1 if placement is None else placement.shape[1]
    constants = (
        {"HAS_OUT": out is not None, "PLACES": places, "STREAMS": num, "OUTPUTS": outputs, "COLS": cols}
        | tile
        | pdl.options()
    )
    grid = (triton.cdiv(num_tokens, tile["BLOCK_T"]), splits)
    if num_tokens <= FEW_TOKENS:
        mix_streams_kernel[grid](*args, **constants)
    else:
        mix_all_streams_kernel[grid](*args, steps, **constants)
    launch = join_launch(splits, size)
    num_mixing = triton.cdiv(num_tokens, launch["TOKENS"]) if mix else 0
    join_streams_kernel[(num_mixing + num_tokens,)](
        mixed, sums if placement is None else placement, sums, base, scale, weight, x, following if mix else sums,
        num_tokens, size, splits, eps, mix_eps, rounds, MIX=mix, LAGGED=lagged,
        HAS_BEFORE=lagged and placement is not None, STREAMS=num, OUTPUTS=outputs, COLS=cols, MAGNITUDE=magnitude,
        **launch, **pdl.options(),
    )  # fmt: skip
    return mixed, x, following
