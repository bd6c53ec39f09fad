"""Candidate tiles of the tiled kernels, best first. Data only: no torch, no Triton, no device.

A tile is a dict that a kernel's launcher takes as it is. Every tile of `tiles` fits 101,376 bytes of shared memory (the
sm_86/89/120/121 limit) without spills, which the ledger proves; `prefer` lists tiles for GPUs with a given feature that
are tried before those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

AttentionTile = dict[str, int]

MIN_TOKENS = "least_tokens"
"""Key of a tile for the fewest tokens of a step that takes it; smaller steps take the next tile of its row."""

HEAD_DIMS: tuple[tuple[int, int], ...] = (
    (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256), (288, 256),
    (320, 256), (512, 512), (576, 512), (1088, 1024),
)  # fmt: skip
"""(head_dim, v_head_dim) that the attention kernels support."""

MLA_LATENT = (576, 512)
"""One key head whose first 512 columns are the value."""
MLA_NARROW = (320, 256)
"""Mistral 4's latents, which are half as long."""
MLA_WIDE = (1088, 1024)
"""Latents of dots3's windows, which always have 16 bits."""
MLA_LATENTS = (MLA_LATENT, MLA_NARROW, MLA_WIDE)


@dataclass(frozen=True, slots=True)
class TileRow:
    """Tiles of one op for the listed (head_dim, v_head_dim) and KV element sizes in bytes; 0: four-bit keys and values,
    with their scales."""

    op: str
    head_dims: tuple[tuple[int, int], ...]
    kv_bytes: tuple[int, ...]
    tiles: tuple[AttentionTile, ...]
    prefer: Mapping[str, tuple[AttentionTile, ...]] = field(default_factory=dict)

    def candidates(self, features: Collection[str]) -> Iterator[AttentionTile]:
        """Yields the tiles for a GPU with these features, best first."""
        for feature, tiles in self.prefer.items():
            if feature in features:
                yield from tiles
        yield from self.tiles


def _qkv(m: int, n: int, warps: int, stages: int) -> AttentionTile:
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}


def _split(h: int, n: int, warps: int, stages: int, ctas_per_sm: int, waves: int = 4) -> AttentionTile:
    """Returns a decode tile. `ctas_per_sm`: programs that share an SM; `waves`: rounds of these into which a large
    batch is split."""
    tile = {"BLOCK_H": h, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    return tile | {"ctas_per_sm": ctas_per_sm, "waves": waves}


def _gather(h: int, n: int, warps: int, stages: int, ctas_per_sm: int, least_tokens: int = 1) -> AttentionTile:
    """Returns a tile that reads BLOCK_N selected entries at a time, for steps of at least `least_tokens` tokens."""
    tile = {"BLOCK_H": h, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "ctas_per_sm": ctas_per_sm}
    return tile | ({MIN_TOKENS: least_tokens} if least_tokens > 1 else {})


def _scores(m: int, n: int, warps: int, stages: int, ctas_per_sm: int) -> AttentionTile:
    """Returns a tile of an indexer's scores. `m`: heads of one or more tokens."""
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "ctas_per_sm": ctas_per_sm}


_HALF = (2,)
_FP8 = (1,)
_ANY = (1, 2)
_FP4 = (0,)
_FP4_128, _FP4_256 = ((80, 80), (96, 96), (128, 128)), ((160, 160), (192, 128), (192, 192), (256, 256))
"""FP4 keys and values of other dims take the tiles of the next power of two, to which their groups are padded."""
_NARROW = ((72, 72), (80, 80), (96, 96))
_WIDEST = ((288, 256),)
_LATENT = ((512, 512), MLA_LATENT)


def _extend_rows(op: str, kv_bytes: tuple[int, ...]) -> tuple[TileRow, ...]:
    wgmma = {"wgmma": (_qkv(128, 64, 8, 3),)}
    wgmma_192 = {"wgmma": (_qkv(128, 64, 8, 2),)}
    image_tiles, odd_tiles = (_qkv(128, 32, 8, 2), _qkv(64, 32, 8, 2)), (_qkv(32, 32, 8, 2), _qkv(16, 16, 4, 2))
    rows = (
        # Two buffers of keys, because registers let an SM have only one program, which would idle while keys arrive.
        TileRow(op, ((64, 64),), kv_bytes, (_qkv(128, 64, 8, 3), _qkv(64, 32, 4, 2)), wgmma),
        TileRow(op, ((80, 80), (96, 96)), kv_bytes, (_qkv(128, 32, 8, 2), _qkv(64, 32, 8, 2)), wgmma),
        # Rows of 72 elements lie in no multiples of 16 and are loaded in pieces, which costs registers; image encoders,
        # which are not causal, keep larger tiles.
        TileRow(op, ((72, 72),), kv_bytes, image_tiles if op == "prefill_attention" else odd_tiles, wgmma),
        TileRow(op, ((128, 128),), _HALF, (_qkv(64, 32, 4, 2), _qkv(32, 32, 4, 2)), {"wgmma": (_qkv(64, 64, 4, 3),)}),
        TileRow(op, ((192, 128),), kv_bytes, (_qkv(64, 64, 8, 2), _qkv(64, 32, 8, 2)), wgmma_192),
        TileRow(op, ((160, 160),), kv_bytes, (_qkv(64, 32, 8, 2), _qkv(32, 32, 4, 2))),
        TileRow(op, ((192, 192), (256, 256)), _HALF, (_qkv(64, 32, 8, 2), _qkv(32, 32, 4, 2))),
        TileRow(op, _WIDEST, _HALF, (_qkv(64, 16, 8, 3), _qkv(32, 32, 8, 2))),
        TileRow(op, _LATENT, kv_bytes, (_qkv(32, 16, 8, 2), _qkv(16, 16, 4, 2))),
        TileRow(op, (MLA_NARROW,), kv_bytes, (_qkv(64, 16, 8, 2), _qkv(32, 16, 8, 2))),
    )
    if kv_bytes == _HALF:
        return rows
    # Converting float8 keys costs registers, and so do windows, caps and sinks: fewer rows a warp, or fewer keys at a
    # time, than with 16-bit keys.
    return (
        *rows,
        TileRow(op, ((128, 128),), _FP8, (_qkv(64, 64, 8, 2), _qkv(32, 32, 4, 2)), wgmma),
        TileRow(op, ((192, 192), (256, 256)), _FP8, (_qkv(64, 16, 8, 3), _qkv(32, 32, 4, 2))),
        TileRow(op, _WIDEST, _FP8, (_qkv(32, 32, 8, 2), _qkv(32, 16, 8, 2))),
    )


ROWS: tuple[TileRow, ...] = (
    *_extend_rows("extend_attention", _ANY),
    *_extend_rows("prefill_attention", _HALF),
    TileRow("extend_attention", (MLA_WIDE,), _HALF, (_qkv(16, 16, 8, 2),)),
    # With 16-bit keys two stages keep as many bytes in flight as three, and spill nothing.
    TileRow(
        "decode_attention", ((64, 64),), _HALF,
        (_split(16, 64, 4, 2, 2), _split(16, 32, 4, 3, 4)), {"wgmma": (_split(16, 64, 2, 3, 4),)},
    ),
    TileRow(
        "decode_attention", ((64, 64),), _FP8,
        (_split(16, 64, 4, 3, 2), _split(16, 32, 4, 3, 4)), {"wgmma": (_split(16, 64, 4, 3, 4),)},
    ),
    TileRow(
        "decode_attention", (*_NARROW, (192, 128)), _ANY,
        (_split(16, 64, 4, 3, 2), _split(16, 32, 4, 3, 4)), {"wgmma": (_split(16, 64, 4, 3, 4),)},
    ),
    # With `wgmma` one stage: enough programs share an SM, and short pieces do not wait for a pipeline to fill.
    TileRow(
        "decode_attention", ((128, 128),), _HALF,
        (_split(16, 64, 4, 3, 2), _split(16, 32, 4, 3, 4)), {"wgmma": (_split(16, 64, 4, 1, 4),)},
    ),
    TileRow(
        "decode_attention", ((128, 128),), _FP8,
        (_split(16, 64, 4, 2, 2), _split(16, 32, 4, 3, 4)), {"wgmma": (_split(16, 64, 4, 3, 4),)},
    ),
    TileRow(
        "decode_attention", ((160, 160), (192, 192), *_WIDEST), _ANY,
        (_split(16, 32, 4, 3, 2), _split(16, 16, 4, 2, 2)),
    ),
    TileRow(
        "decode_attention", ((256, 256),), _HALF,
        (_split(16, 32, 4, 3, 2), _split(16, 16, 4, 2, 2)), {"wgmma": (_split(16, 64, 4, 1, 2),)},
    ),
    # Half as many float8 keys at a time and three programs an SM spill nothing, with as many bytes in flight.
    TileRow(
        "decode_attention", ((256, 256),), _FP8,
        (_split(16, 16, 4, 3, 3), _split(16, 16, 4, 2, 2)), {"wgmma": (_split(16, 32, 4, 3, 2),)},
    ),
    TileRow("decode_attention", ((512, 512),), _ANY, (_split(16, 16, 4, 3, 2), _split(16, 16, 4, 2, 2))),
    # Three stages: one for the slots, two for latents. With `wgmma` 64 tokens in one buffer: on an H100 8 x 32,768
    # tokens and 128 heads take 295 us where 32 tokens in two take 334, and one request of 65,536 with 64 heads 65 for
    # 63. Eight warps for twice as many float8 latents at a time, which take as many bytes.
    TileRow(
        "decode_attention", (MLA_LATENT,), _HALF, (_split(16, 32, 4, 3, 1, 2), _split(16, 16, 4, 3, 1, 2)),
        {
            "wgmma": (
                *(_split(64, 64, 8, 2, 1, 2), _split(64, 32, 8, 3, 1, 2)),
                *(_split(32, 32, 4, 3, 2, 2), _split(16, 32, 4, 3, 2, 2)),
            )
        },
    ),
    TileRow(
        "decode_attention", (MLA_LATENT,), _FP8, (_split(16, 64, 8, 3, 1, 2), _split(16, 32, 4, 3, 1, 2)),
        {"wgmma": (_split(64, 64, 8, 3, 1, 2), _split(32, 32, 4, 3, 2, 2), _split(16, 128, 8, 3, 1, 2))},
    ),
    # Sizes are predictions: shared memory and registers are on record, times are not measured.
    TileRow("decode_attention", (MLA_NARROW,), _HALF, (_split(16, 64, 8, 3, 1, 2), _split(16, 32, 4, 3, 1, 2))),
    TileRow("decode_attention", (MLA_NARROW,), _FP8, (_split(16, 64, 8, 3, 1, 2), _split(16, 32, 4, 3, 1, 2))),
    TileRow("decode_attention", (MLA_WIDE,), _HALF, (_split(16, 16, 8, 2, 1, 2),)),
    # Blocks of 32 or 64 heads where a rank has as many read entries less often, which pays where a step has tokens for
    # all SMs: on an H200 0.53 of the time of blocks of 16 with 64 heads and latents, 0.74 with 32; 1.1 to 1.7 in steps
    # of 64 tokens. With one block an SM, as SM120's shared memory allows, 0.88 to 0.92. Float8 means packed latents.
    TileRow(
        "sparse_attention", (MLA_LATENT,), _HALF,
        (_gather(32, 32, 8, 2, 1, 128), _gather(16, 32, 4, 3, 1), _gather(16, 16, 4, 3, 1)),
        {"wgmma": (_gather(64, 64, 8, 2, 1, 16), _gather(32, 32, 4, 2, 1, 128), _gather(16, 32, 4, 3, 2))},
    ),
    TileRow(
        "sparse_attention", (MLA_LATENT,), _FP8,
        (_gather(32, 32, 8, 3, 1, 128), _gather(16, 32, 4, 3, 1), _gather(16, 16, 4, 3, 1)),
        {"wgmma": (_gather(32, 32, 4, 2, 1, 128), _gather(16, 32, 4, 3, 2))},
    ),
    TileRow(
        "sparse_attention", ((512, 512),), _HALF,
        (_gather(32, 32, 8, 3, 1, 128), _gather(16, 32, 4, 3, 1), _gather(16, 16, 4, 3, 1)),
        {"wgmma": (_gather(64, 64, 8, 2, 1, 128), _gather(32, 32, 4, 2, 1, 128), _gather(16, 32, 4, 3, 2))},
    ),
    # Records of latents (`plan.latent_record`). On an H200 blocks of 32 heads take 0.91 of the time of 16 in steps of
    # 16 tokens of DeepSeek-V4, and 1.2 of it in steps of one. Those in four bits would spill.
    TileRow(
        "sparse_attention", ((512, 512),), _FP8,
        (_gather(32, 32, 8, 3, 1, 16), _gather(16, 32, 4, 3, 1), _gather(16, 16, 4, 3, 1)),
    ),
    TileRow(
        "sparse_attention", ((512, 512), MLA_LATENT, MLA_NARROW), _FP4,
        (_gather(16, 32, 8, 3, 1), _gather(16, 16, 4, 3, 1)),
    ),
    # Eight or twelve heads of a KV head share a block of 16 rows; what is read per token is the same for all tiles.
    TileRow(
        "selected_block_attention", ((128, 128),), _HALF, (_gather(16, 64, 4, 2, 2), _gather(16, 32, 4, 2, 2)),
    ),
    TileRow(
        "selected_block_attention", ((256, 256),), _HALF, (_gather(16, 32, 4, 2, 2), _gather(16, 16, 4, 2, 2)),
    ),
    # Sizes are predictions, as those of records.
    TileRow(
        "selected_block_attention", ((128, 128),), _FP8, (_gather(16, 64, 8, 2, 2), _gather(16, 32, 4, 2, 2)),
    ),
    TileRow(
        "selected_block_attention", ((256, 256),), _FP8, (_gather(16, 32, 8, 2, 2), _gather(16, 16, 4, 2, 2)),
    ),
    TileRow(
        "sparse_indexer", ((128, 128),), _FP8,
        (_scores(128, 128, 4, 2, 2), _scores(64, 128, 4, 2, 2)), {"wgmma": (_scores(128, 128, 4, 4, 2),)},
    ),
    TileRow("sparse_indexer", ((128, 128),), _HALF, (_scores(128, 64, 4, 2, 2), _scores(64, 64, 4, 2, 2))),
    TileRow("sparse_indexer", ((256, 256),), _HALF, (_scores(64, 64, 8, 2, 1), _scores(32, 32, 4, 2, 1))),
    TileRow("block_indexer", ((128, 128),), _HALF, (_scores(64, 64, 4, 2, 2), _scores(32, 64, 4, 2, 2))),
    # Sizes are predictions: shared memory and registers are on record, times are not measured.
    TileRow("block_attention", ((128, 128),), _HALF, (_gather(16, 64, 4, 2, 2), _gather(16, 32, 4, 3, 2))),
    TileRow(
        "block_attention", ((128, 128),), _FP8,
        (_gather(16, 64, 4, 3, 2), _gather(16, 32, 4, 3, 3)), {"wgmma": (_gather(16, 32, 4, 3, 3),)},
    ),
    TileRow(
        "block_attention", ((192, 128), (192, 192)), _HALF, (_gather(16, 32, 4, 2, 2), _gather(16, 16, 4, 2, 2)),
    ),
    TileRow(
        "block_attention", ((192, 128), (192, 192)), _FP8, (_gather(16, 32, 4, 3, 2), _gather(16, 16, 4, 3, 2)),
    ),
    # Keys and values expanded from latents always have 16 bits.
    TileRow(
        "latent_prompt_attention", ((192, 128),), _HALF,
        (_qkv(64, 64, 8, 2), _qkv(64, 32, 8, 2)), {"wgmma": (_qkv(128, 64, 8, 2),)},
    ),
    TileRow(
        "latent_prompt_attention", ((128, 128),), _HALF,
        (_qkv(64, 64, 8, 2), _qkv(64, 32, 4, 2)), {"wgmma": (_qkv(128, 64, 8, 2),)},
    ),
    TileRow("latent_prompt_attention", ((256, 128), (256, 256)), _HALF, (_qkv(64, 32, 8, 2), _qkv(32, 32, 4, 2))),
    # FP4 keys and values are dequantized in registers. Sizes are predictions: shared memory and registers are on
    # record, times are not measured.
    TileRow("extend_attention", ((64, 64),), _FP4, (_qkv(64, 32, 4, 2), _qkv(32, 32, 8, 2))),
    TileRow("extend_attention", _FP4_128, _FP4, (_qkv(64, 32, 8, 2), _qkv(32, 32, 8, 2))),
    TileRow("extend_attention", _FP4_256, _FP4, (_qkv(32, 32, 8, 2), _qkv(32, 16, 8, 2))),
    TileRow("extend_attention", ((512, 512),), _FP4, (_qkv(16, 16, 8, 2), _qkv(16, 16, 4, 2))),
    TileRow(
        "decode_attention", ((64, 64), *_FP4_128), _FP4, (_split(16, 64, 4, 2, 3), _split(16, 32, 4, 2, 4)),
    ),
    TileRow("decode_attention", _FP4_256, _FP4, (_split(16, 32, 4, 2, 3), _split(16, 16, 4, 2, 3))),
    TileRow("decode_attention", ((512, 512),), _FP4, (_split(16, 32, 8, 2, 2), _split(16, 16, 4, 2, 2))),
)  # fmt: skip


def find_row(op: str, head_dim: int, v_head_dim: int, kv_bytes: int) -> TileRow | None:
    """Returns the row of tiles for the op and shape; None: the kernels do not support them. `kv_bytes`: as in
    TileRow."""
    for row in ROWS:
        if row.op == op and (head_dim, v_head_dim) in row.head_dims and kv_bytes in row.kv_bytes:
            return row
    return None


KV_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp4_e2m1": 0}
"""Bytes of an element of keys and values, as rows have them."""


def attention_tiles(
    op: str, head_dim: int, v_head_dim: int, kv_dtype: str, features: Collection[str], group: int = 0
) -> tuple[AttentionTile, ...]:
    """Returns candidate tiles, best first; empty if the kernels do not support the shape or the dtype. `group`: query
    heads that share a KV head, 0 if unknown: blocks of more heads would be partly idle."""
    row = find_row(op, head_dim, v_head_dim, KV_BYTES.get(kv_dtype, -1))
    if row is None:
        return ()
    return tuple(tile for tile in row.candidates(features) if not group or tile.get("BLOCK_H", 0) <= max(16, group))


def fp4_head_dims() -> tuple[tuple[int, int], ...]:
    """Returns the (head_dim, v_head_dim) that have tiles for FP4 keys and values."""
    return tuple(
        dims for row in ROWS if row.op == "decode_attention" and row.kv_bytes == _FP4 for dims in row.head_dims
    )
