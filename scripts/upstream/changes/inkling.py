"""Inkling's grouped expert product."""

from __future__ import annotations

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck, NotApplicable
from upstream.toolbox import code, edit, ensure_import, find, replace
from upstream.tree import Tree


class InklingStages(Change):
    name = "inkling-stages"
    title = "Inkling MoE: stages by shared memory, not by model number"
    why = (
        "Four stages need 110,592 bytes. Only sm_121 takes three, though sm_120 (RTX PRO 6000, RTX 50) has the "
        "same 101,376 bytes."
    )
    merged = "the number of stages does not depend on is_sm121"
    files = ("hardware.py",)

    function = "grouped_gemm_triton"
    NEEDED = 110_592

    def transform(self, tree: Tree) -> None:
        if not any("inkling_moe" in path for path in tree.python_files()):
            raise NotApplicable("the release has no Inkling")
        anchor = find(tree, self.function, parameters=("a", "b"), near="inkling_moe")
        if "is_sm121" not in code(anchor.node):
            raise AlreadyUpstream("the number of stages no longer depends on is_sm121")
        stages = replace(m.Call(func=m.Name("is_sm121")), f"(0 < shared_memory_limit() < {self.NEEDED})", expected=1)
        edit(tree, anchor, stages)
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.hardware import shared_memory_limit")

    def check(self, tree: Tree) -> None:
        (choice,) = self._choices(tree)
        for limit, stages in ((101_376, 3), (232_448, 4), (0, 4)):
            if eval(choice, {"shared_memory_limit": lambda limit=limit: limit}) != stages:
                raise FailedCheck(f"with {limit} bytes of shared memory there are not {stages} stages")

    def _choices(self, tree: Tree) -> list[str]:
        """The expressions that choose a number of stages."""
        node = find(tree, self.function, near="inkling_moe").node
        return [code(choice) for choice in m.findall(node, m.IfExp()) if "shared_memory_limit" in code(choice)]
