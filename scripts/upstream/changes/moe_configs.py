"""Tiles of the fused MoE kernel: tuning files, defaults, and what shared memory can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck
from upstream.own_files import own
from upstream.toolbox import before_last_return, code, edit, ensure_import, find, isolated, replace, wrap_returns
from upstream.tree import Tree

_OFF = SimpleNamespace(
    enable_deterministic_inference=False, deterministic=SimpleNamespace(enable_deterministic_inference=False)
)
_ARGUMENTS = {"get_global_server_args": lambda: _OFF, "get_exec": lambda: _OFF, "_is_hip": False}
"""Server arguments, in either form that releases read them in."""

LIMIT = 101_376


class MoeEditions(Change):
    name = "moe-editions"
    title = "MoE tuning files: one for all editions of a card"
    why = (
        "Tuning files are found by the exact device name, so the Server, Workstation and Max-Q editions of one "
        "card do not share them, and the default tile is used. A file of another edition is now taken when the "
        "exact one does not exist."
    )
    merged = "get_moe_configs looks for other editions of a device"
    files = ("hardware.py", "moe_configs.py")

    function = "get_moe_configs"

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("E", "N", "dtype"))
        if "edition" in code(anchor.node).lower():
            raise AlreadyUpstream("it looks for other editions")
        call = m.Call(func=m.Name("get_config_file_name"))
        edit(tree, anchor, replace(call, "find_edition({}, __file__)", expected=1))
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.moe_configs import find_edition")

    def check(self, tree: Tree) -> None:
        """Looking a file up must ask for the edition, with the name and the place that the release uses."""
        asked: list[tuple[str, str]] = []

        def find_edition(name: str, file: str) -> str:
            asked.append((name, file))
            return name

        import json
        import os

        look_up = isolated(
            tree,
            self.function,
            _ARGUMENTS
            | {
                "os": SimpleNamespace(environ={}, path=os.path, listdir=lambda path: []),
                "json": json,
                "triton": SimpleNamespace(__version__="3.6.0"),
                "__file__": "/nowhere/module.py",
                "get_config_file_name": lambda *args, **kwargs: "E=8.json",
                "find_edition": find_edition,
            },
        )
        if look_up(8, 16, None) is not None or asked != [("E=8.json", "/nowhere/module.py")]:
            raise FailedCheck(f"a look-up asked for {asked}")


class MoeDefault(Change):
    name = "moe-default"
    title = "MoE default tile: a smaller one where shared memory is small"
    why = (
        "Without a tuning file, FP8 weights with a scale a tensor or a channel take a tile of 147,456 bytes at "
        "the first longer request, and SM12x has 101,376: the server dies then."
    )
    merged = "get_default_config has a tile for small shared memory (_use_low_smem_fp8_default)"
    files = ("hardware.py", "moe_configs.py")

    function = "get_default_config"

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("M", "E", "dtype", "block_shape"))
        if max(self._needs(tree, {"low_shared_memory_default": None})) <= LIMIT:
            raise AlreadyUpstream("its default for small shared memory fits")
        edit(
            tree,
            anchor,
            before_last_return("config = low_shared_memory_default(config, M, E, dtype, block_shape)\n"),
        )
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.moe_configs import low_shared_memory_default")

    def check(self, tree: Tree) -> None:
        module = own("moe_configs")
        small = _with_limit(module.low_shared_memory_default, module, LIMIT)
        if (worst := max(self._needs(tree, {"low_shared_memory_default": small}))) > LIMIT:
            raise FailedCheck(f"a default tile still needs {worst} bytes")
        large = _with_limit(module.low_shared_memory_default, module, 232_448)
        if max(self._needs(tree, {"low_shared_memory_default": large}, low=False)) <= LIMIT:
            raise FailedCheck("GPUs with much shared memory get the small tile as well")

    def _needs(self, tree: Tree, namespace: dict[str, Any], low: bool = True) -> list[int]:
        """Bytes that the default tiles need, for one token and many, plain and blockwise FP8."""
        default = isolated(tree, self.function, _ARGUMENTS | {"_use_low_smem_fp8_default": lambda: low} | namespace)
        tiles = [
            default(tokens, 160, 192, 5120, 8, "fp8_w8a8", False, block_shape)
            for tokens in (1, 4096)
            for block_shape in (None, [128, 128])
        ]
        return [own("moe_configs").needed_shared_memory(tile, "fp8_w8a8") for tile in tiles]


class MoeCapacity(Change):
    name = "moe-capacity"
    title = "MoE tiles: fewer stages where shared memory cannot hold them"
    why = (
        "A tuning file made on another GPU, or for another edition of Triton, can name a tile that the GPU "
        "cannot hold. It now loses stages, and then width, until it fits, with one warning, instead of ending "
        "the server."
    )
    merged = "try_get_optimal_moe_config compares a tile with the GPU's shared memory"
    files = ("hardware.py", "moe_configs.py")

    function = "try_get_optimal_moe_config"

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("w1_shape", "w2_shape", "dtype", "M"))
        if "shared_mem" in code(anchor.node):
            raise AlreadyUpstream("it considers shared memory")
        edit(tree, anchor, wrap_returns("fit_all({}, dtype)"))
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.moe_configs import fit_all")

    def check(self, tree: Tree) -> None:
        returned = m.findall(find(tree, self.function).node, m.Return())
        if not all(code(statement).startswith("return fit_all(") for statement in returned):
            raise FailedCheck("a tile is returned that was not compared with shared memory")


def _with_limit(function: Any, module: Any, limit: int) -> Any:
    """`function` of `module`, as on a GPU with that much shared memory."""

    def call(*args: Any) -> Any:
        before, module.shared_memory_limit = module.shared_memory_limit, lambda: limit
        try:
            return function(*args)
        finally:
            module.shared_memory_limit = before

    return call
