"""Tiles of Triton attention for prompts: over the KV cache (extend) and without one (prefill, vision towers)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from upstream.change import AlreadyUpstream, Change, FailedCheck
from upstream.own_files import own
from upstream.toolbox import (
    after_assignment,
    before_last_return,
    edit,
    ensure_import,
    find,
    isolated,
    next_power_of_2,
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


def _tensor(*shape: int) -> Any:
    return SimpleNamespace(shape=shape, stride=lambda dimension: 1, dtype=None)


class ExtendTiles(Change):
    name = "extend-tiles"
    title = "Extend attention: tiles that SM12x can hold"
    why = (
        "SM12x has 101,376 bytes of shared memory a block. The tile of Hopper needs 106,496 for MLA (head dims "
        "576/512), and tiles that fit spill up to 1,756 bytes a thread, most with an fp8 KV cache. The tiles "
        "here fit with 16-bit and fp8 KV, and spill nothing with causal masks but for 64-wide heads (up to 96 "
        "bytes); masks of another form are the change tree-mask-tiles."
    )
    merged = "the release's own tiles for capability 12 are among those measured without spills"
    files = ("hardware.py", "attention_tiles.py")

    function = "_get_block_sizes_for_extend_attention"

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("Lq", "Lv"))
        if self._tiles(tree, capability=(12, 0), forced=False) == self._wanted():
            raise AlreadyUpstream("its tiles for capability 12 are the measured ones")
        edit(
            tree,
            anchor,
            before_last_return("if USE_SM120_TILES:\n    BLOCK_M, BLOCK_N, num_warps = sm120_extend_tile(Lq, Lv)\n"),
        )
        ensure_import(
            tree, anchor.path, "from sglang.srt.sm120.attention_tiles import extend_tile as sm120_extend_tile"
        )
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.attention_tiles import USE_SM120_TILES")

    def check(self, tree: Tree) -> None:
        if self._tiles(tree, capability=(12, 0), forced=True) != self._wanted():
            raise FailedCheck("capability 12 does not get the measured tiles")
        for capability in ((8, 0), (9, 0), (10, 0)):
            if self._tiles(tree, capability, forced=False) == self._wanted():
                raise FailedCheck(f"capability {capability} gets the tiles of SM12x")

    def _tiles(self, tree: Tree, capability: tuple[int, int], forced: bool) -> list[tuple[int, ...]]:
        """What the function returns for (BLOCK_M, BLOCK_N, num_warps), for every shape."""
        function = isolated(
            tree,
            self.function,
            {
                "triton": SimpleNamespace(next_power_of_2=next_power_of_2),
                "CUDA_CAPABILITY": capability,
                "_is_cuda": True,
                "USE_SM120_TILES": forced,
                "sm120_extend_tile": own("attention_tiles").extend_tile,
            },
        )
        return [tuple(function(*dims)[-3:]) for dims in HEAD_DIMS]

    def _wanted(self) -> list[tuple[int, ...]]:
        return [own("attention_tiles").extend_tile(*dims) for dims in HEAD_DIMS]


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

    function = "extend_attention_fwd"
    near = "/extend_attention.py"  # older releases have another one, for double sparsity

    def transform(self, tree: Tree) -> None:
        parameters = ("q_extend", "k_extend", "v_extend", "custom_mask")
        anchor = find(tree, self.function, parameters=parameters, near=self.near)
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
        theirs = (128, 32, 2)  # stands for the release's choice; none of ours

        def sizes(Lq: int, Lv: int) -> tuple[int, ...]:
            return Lq, 0, Lv, *theirs

        if self._tiles(tree, masked=True, forced=True, sizes=sizes) != self._wanted():
            raise FailedCheck("a mask does not get the measured tiles on SM12x")
        for masked, forced in ((False, True), (True, False)):
            if self._tiles(tree, masked, forced, sizes) != [theirs] * len(HEAD_DIMS):
                raise FailedCheck("without a mask, or on other GPUs, the release no longer chooses the tile")

    def _tiles(
        self, tree: Tree, masked: bool, forced: bool, sizes: Callable[..., Any] | None = None
    ) -> list[tuple[int, ...]]:
        """(BLOCK_M, BLOCK_N, num_warps) that the function launches, for every shape; `sizes`: what chooses first."""
        launches = Launches()
        namespace = {
            "triton": SimpleNamespace(next_power_of_2=next_power_of_2, cdiv=lambda a, b: -(-a // b)),
            "CUDA_CAPABILITY": (12, 0),
            "_is_cuda": True,
            "_fwd_kernel": launches,
            "_extract_kv_strides": lambda *_: (1, 1, 1, 1),
            "unpack_aux_tensors": lambda *_: (None, 1, 1, 1),
            "USE_SM120_TILES": forced,
            "sm120_masked_tile": own("attention_tiles").masked_extend_tile,
        }
        namespace[ExtendTiles.function] = sizes or isolated(tree, ExtendTiles.function, namespace)
        function = isolated(tree, self.function, namespace, near=self.near)
        for head_dim, v_head_dim in HEAD_DIMS:
            q, v = (_tensor(8, 4, width) for width in (head_dim, v_head_dim))
            mask = _tensor(64) if masked else None
            cached = {"k_buffer": q, "v_buffer": v, "qo_indptr": _tensor(2), "kv_indptr": None, "kv_indices": None}
            masks = {"custom_mask": mask, "is_causal": True, "mask_indptr": mask}
            new = {"q_extend": q, "k_extend": q, "v_extend": v, "o_extend": v, "max_len_extend": 8}
            scales = {name: 1.0 for name in ("k_scale", "v_scale") if name in inspect.signature(function).parameters}
            function(**new, **cached, **masks, **scales)
        return [(launch["BLOCK_M"], launch["BLOCK_N"], launch["num_warps"]) for launch in launches.made]

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
