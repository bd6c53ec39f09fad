"""Tiles of Triton attention for prompts: over the KV cache (extend) and without one (prefill, vision towers)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from upstream.change import AlreadyUpstream, Change, FailedCheck
from upstream.own_files import own
from upstream.toolbox import (
    Anchor,
    after_assignment,
    edit,
    ensure_import,
    find,
    isolated,
    next_power_of_2,
    parameter_names,
)
from upstream.tree import Tree

HEAD_DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (288, 256),
    (512, 512),
    (576, 512),
)


class Launches:
    """Stands for a kernel and keeps the keyword arguments of every launch."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.made.append(kwargs)


def _tensor(*shape: int, itemsize: int = 2) -> Any:
    return SimpleNamespace(shape=shape, stride=lambda dimension: 1, dtype=SimpleNamespace(itemsize=itemsize))


SIZES = "_get_block_sizes_for_extend_attention"
LAUNCHER = "extend_attention_fwd"
ONE_STAGE = "extend_attention_fwd_unified"
"""The kernel of deterministic inference; prefix and new tokens in one loop."""
NEAR = "/extend_attention.py"  # older releases have another launcher, for double sparsity
THEIRS = (128, 32, 2)
"""Stands for a release's choice in checks; none of ours."""


def extend_launches(
    tree: Tree, name: str, *, forced: bool, kv_bytes: int = 2, sizes: Callable[..., Any] | None = None, **given: Any
) -> list[tuple[int, ...]]:
    """(BLOCK_M, BLOCK_N, num_warps) that the launcher `name` launches on capability 12, for every shape.

    `sizes`: what chooses first, if not the release's function. `given`: arguments, for those that the launcher takes.
    """
    launches = Launches()
    namespace = {
        "triton": SimpleNamespace(next_power_of_2=next_power_of_2, cdiv=lambda a, b: -(-a // b)),
        "CUDA_CAPABILITY": (12, 0),
        "_is_cuda": True,
        "_fwd_kernel": launches,
        "_fwd_kernel_unified": launches,
        "_extract_kv_strides": lambda *_: (1, 1, 1, 1),
        "unpack_aux_tensors": lambda *_: (None, 1, 1, 1),
        "USE_SM120_TILES": forced,
        "sm120_extend_tile": own("attention_tiles").extend_tile,
        "sm120_is_plain": own("attention_tiles").is_plain,
        "sm120_masked_tile": own("attention_tiles").masked_extend_tile,
    }
    namespace[SIZES] = sizes or isolated(tree, SIZES, namespace)
    function = isolated(tree, name, namespace, near=NEAR)
    for head_dim, v_head_dim in HEAD_DIMS:
        q, v = (_tensor(8, 4, width) for width in (head_dim, v_head_dim))
        k_buffer, v_buffer = (_tensor(8, 4, width, itemsize=kv_bytes) for width in (head_dim, v_head_dim))
        tensors = {"q": q, "o": v, "q_extend": q, "k_extend": q, "v_extend": v, "o_extend": v}
        cached = {"k_buffer": k_buffer, "v_buffer": v_buffer, "qo_indptr": _tensor(2), "prefix_lens": _tensor(1)}
        empty = dict.fromkeys(("kv_indptr", "kv_indices", "custom_mask", "mask_indptr"))
        numbers = {"is_causal": True, "max_len_extend": 8, "k_scale": 1.0, "v_scale": 1.0}
        values = tensors | cached | empty | numbers | given
        function(**{name: values[name] for name in inspect.signature(function).parameters if name in values})
    return [(launch["BLOCK_M"], launch["BLOCK_N"], launch["num_warps"]) for launch in launches.made]


def _their_sizes(Lq: int, Lv: int) -> tuple[int, ...]:
    return Lq, 0, Lv, *THEIRS


class ExtendTiles(Change):
    name = "extend-tiles"
    title = "Extend attention: tiles that SM12x can hold"
    why = (
        "SM12x has 101,376 bytes of shared memory a block. The tile of Hopper needs 106,496 for MLA (head dims "
        "576/512), and tiles that fit spill up to 1,756 bytes a thread, most with an fp8 KV cache. The tiles "
        "here fit with 16-bit and fp8 KV, and spill nothing with causal masks but for 64-wide heads (up to 96 "
        "bytes); masks of another form are the change tree-mask-tiles. A tile of the release that was measured to "
        "spill nothing stays as it is: those for head dims 65 to 128 with an fp8 KV cache and for 256 with a 16-bit "
        "one among them. Most of those spill 8 to 40 bytes with Triton 3.6 and so stay from Triton 3.9 on; with "
        "windows, caps and masks, which take registers, the tiles here are launched."
    )
    merged = "the release's own tiles for capability 12 are among those measured without spills"
    files = ("hardware.py", "attention_tiles.py")

    FEATURES = ("sliding_window_size", "logit_cap", "custom_mask", "xai_temperature_len", "score_mod")
    """Parameters, off if at or below zero or None, whose work in the kernel takes registers. Sinks take none."""

    def transform(self, tree: Tree) -> None:
        find(tree, SIZES, parameters=("Lq", "Lv"))
        anchors = self._anchors(tree)
        if all(self._launched(tree, kv_bytes, forced=False) == self._wanted(tree, kv_bytes) for kv_bytes in (1, 2)):
            raise AlreadyUpstream("its tiles for capability 12 are the measured ones")
        for anchor in anchors:
            anchor = find(tree, anchor.name, near=NEAR)  # as the edit before this one left it
            edit(tree, anchor, after_assignment("BLOCK_M", self._choice(anchor)))
        for name in ("extend_tile", "is_plain"):
            line = f"from sglang.srt.sm120.attention_tiles import {name} as sm120_{name}"
            ensure_import(tree, anchors[0].path, line)
        ensure_import(tree, anchors[0].path, "from sglang.srt.sm120.attention_tiles import USE_SM120_TILES")

    def _anchors(self, tree: Tree) -> list[Anchor]:
        anchors = [find(tree, LAUNCHER, parameters=("q_extend", "v_extend", "k_buffer"), near=NEAR)]
        if any(path.endswith(NEAR) for path in tree.files_defining(ONE_STAGE)):
            anchors.append(find(tree, ONE_STAGE, parameters=("q", "k_buffer", "v_buffer"), near=NEAR))
        return anchors

    def _choice(self, anchor: Anchor) -> str:
        """The statement that chooses the tile; a release's own tile was measured for the launcher of two stages."""
        names = parameter_names(anchor.node)
        features = ", ".join(name for name in self.FEATURES if name in names)
        plain = f"sm120_is_plain({features})" if anchor.name == LAUNCHER else "False"
        dims = "q_extend.shape[-1], v_extend.shape[-1]" if "q_extend" in names else "q.shape[-1], v_buffer.shape[-1]"
        return (
            "if USE_SM120_TILES:\n"
            "    BLOCK_M, BLOCK_N, num_warps = sm120_extend_tile(\n"
            f"        (BLOCK_M, BLOCK_N, num_warps), {dims}, k_buffer.dtype.itemsize, {plain}\n"
            "    )\n"
        )

    def check(self, tree: Tree) -> None:
        for kv_bytes in (1, 2):
            if self._launched(tree, kv_bytes, forced=True) != self._wanted(tree, kv_bytes):
                raise FailedCheck("capability 12 does not get the measured tiles")
        ours = [own("attention_tiles").extend_tile(THEIRS, *dims, 1, True) for dims in HEAD_DIMS]
        for anchor in self._anchors(tree):
            for forced, wanted in ((True, ours), (False, [THEIRS] * len(HEAD_DIMS))):
                if extend_launches(tree, anchor.name, forced=forced, kv_bytes=1, sizes=_their_sizes) != wanted:
                    raise FailedCheck(f"{anchor.name} does not take the measured tiles on SM12x and there alone")

    def _launched(self, tree: Tree, kv_bytes: int, forced: bool) -> list[tuple[int, ...]]:
        return extend_launches(tree, LAUNCHER, forced=forced, kv_bytes=kv_bytes)

    def _wanted(self, tree: Tree, kv_bytes: int) -> list[tuple[int, ...]]:
        theirs = self._launched(tree, kv_bytes, forced=False)
        choose = own("attention_tiles").extend_tile
        return [choose(tile, *dims, kv_bytes, True) for tile, dims in zip(theirs, HEAD_DIMS, strict=True)]


class TreeMaskTiles(Change):
    name = "tree-mask-tiles"
    title = "Extend attention with a tree mask: tiles that do not spill on SM12x"
    why = (
        "Verifying a tree of drafts reads a mask for every pair of tokens, whose addresses take registers: the tile "
        "of causal masks then spills 76 to 108 bytes a thread at head dims 65 to 128 and up to 80 at 288. The release "
        "chooses the tile before it looks at the mask. Half the rows spill nothing."
    )
    merged = "the release launches the measured tile for a mask on capability 12"
    files = ("hardware.py", "attention_tiles.py")

    def transform(self, tree: Tree) -> None:
        parameters = ("q_extend", "k_extend", "v_extend", "custom_mask")
        anchor = find(tree, LAUNCHER, parameters=parameters, near=NEAR)
        if self._tiles(tree, masked=True, forced=False) == self._wanted():
            raise AlreadyUpstream("its tiles for a mask on capability 12 are the measured ones")
        edit(
            tree,
            anchor,
            after_assignment(
                "BLOCK_M",
                "if USE_SM120_TILES and custom_mask is not None:\n"
                "    BLOCK_M, BLOCK_N, num_warps = sm120_masked_tile(q_extend.shape[-1], v_extend.shape[-1])\n",
            ),
        )
        ensure_import(
            tree, anchor.path, "from sglang.srt.sm120.attention_tiles import masked_extend_tile as sm120_masked_tile"
        )
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.attention_tiles import USE_SM120_TILES")

    def check(self, tree: Tree) -> None:
        if self._tiles(tree, masked=True, forced=True, sizes=_their_sizes) != self._wanted():
            raise FailedCheck("a mask does not get the measured tiles on SM12x")
        if self._tiles(tree, masked=True, forced=False, sizes=_their_sizes) != [THEIRS] * len(HEAD_DIMS):
            raise FailedCheck("on other GPUs, the release no longer chooses the tile")
        if self._tiles(tree, masked=False, forced=True, sizes=_their_sizes) == self._wanted():
            raise FailedCheck("without a mask, the tile for masks is launched")

    def _tiles(
        self, tree: Tree, masked: bool, forced: bool, sizes: Callable[..., Any] | None = None
    ) -> list[tuple[int, ...]]:
        mask = _tensor(64) if masked else None
        return extend_launches(tree, LAUNCHER, forced=forced, sizes=sizes, custom_mask=mask, mask_indptr=mask)

    def _wanted(self) -> list[tuple[int, ...]]:
        return [own("attention_tiles").masked_extend_tile(*dims) for dims in HEAD_DIMS]


class PrefillTiles(Change):
    name = "prefill-tiles"
    title = "Prefill and vision attention: block by head dim on SM12x"
    why = (
        "Every capability above 8 takes blocks of 128. On SM12x that needs 163,840 bytes of shared memory for "
        "head dims 129 to 256, of 101,376, and spills at every head dim. Blocks of 64 fit and spill nothing up to "
        "head dim 256; head dims that are no multiple of 16, such as 72, spill 288 to 2,044 bytes with them, and take "
        "32."
    )
    merged = "the release launches blocks that fit for capability 12"
    files = ("hardware.py", "attention_tiles.py")

    function = "context_attention_fwd"
    HEAD_DIMS = (64, 72, 80, 96, 128, 160, 192, 256)

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("q", "k", "v", "max_input_len"), near="prefill_attention")
        if all(block <= 64 for block in self._blocks(tree, capability=(12, 0), forced=False)):
            raise AlreadyUpstream("its blocks for capability 12 fit")
        edit(
            tree,
            anchor,
            after_assignment("BLOCK", "if USE_SM120_TILES:\n    BLOCK = sm120_prefill_block(q.shape[-1])\n"),
        )
        ensure_import(
            tree, anchor.path, "from sglang.srt.sm120.attention_tiles import prefill_block as sm120_prefill_block"
        )
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.attention_tiles import USE_SM120_TILES")

    def check(self, tree: Tree) -> None:
        if self._blocks(tree, (12, 0), forced=True) != [
            own("attention_tiles").prefill_block(d) for d in self.HEAD_DIMS
        ]:
            raise FailedCheck("capability 12 is not launched with the measured blocks")
        if self._blocks(tree, (9, 0), forced=False) != [128] * len(self.HEAD_DIMS):
            raise FailedCheck("capability 9 is no longer launched with blocks of 128")

    def _blocks(self, tree: Tree, capability: tuple[int, int], forced: bool) -> list[int]:
        """The larger of BLOCK_M and BLOCK_N that the function launches, for every head dim."""
        launches = Launches()
        function = isolated(
            tree,
            self.function,
            {
                "triton": SimpleNamespace(next_power_of_2=next_power_of_2, cdiv=lambda a, b: -(-a // b)),
                "CUDA_CAPABILITY": capability,
                "_is_cuda": True,
                "_is_hip": False,
                "_fwd_kernel": launches,
                "USE_SM120_TILES": forced,
                "sm120_prefill_block": own("attention_tiles").prefill_block,
            },
            near="prefill_attention",
        )
        for head_dim in self.HEAD_DIMS:
            tensor, lengths = _tensor(8, 4, head_dim), _tensor(1)
            function(tensor, tensor, tensor, tensor, lengths, lengths, 8)
        return [max(launch["BLOCK_M"], launch["BLOCK_N"]) for launch in launches.made]
