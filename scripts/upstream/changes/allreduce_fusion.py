"""Fused all-reduce, residual add and norm (FlashInfer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck, NotApplicable
from upstream.interface import argument_defaults
from upstream.toolbox import Anchor, code, edit, ensure_import, find, has, isolated, replace
from upstream.tree import Tree

_BOTH: Any = m.BooleanOperation(operator=m.Or()) & m.MatchIfTrue(
    lambda node: "sm90" in code(node.left) and "sm100" in code(node.right)
)
"""`... sm90 ... or ... sm100 ...`, however a release spells the two."""


class AllReduceFusion(Change):
    name = "allreduce-fusion"
    title = "All-reduce fusion: eligible on SM12x where FlashInfer has the kernel"
    why = (
        "FlashInfer compiles the fused kernel for SM12x from 0.6.18 on, but the predicate knows SM90 and SM100 "
        "only. It is still off unless asked for: over PCIe it does not always win, and without peer access "
        "between GPUs it cannot run."
    )
    merged = "the predicate names SM120"
    files = ("hardware.py", "allreduce.py")

    PREDICATES = ("flashinfer_ar_fusion_applies", "apply_flashinfer_allreduce_fusion")
    CHOICES = "_resolve_backend"

    def transform(self, tree: Tree) -> None:
        if not has(tree, "flashinfer_allreduce_residual_rmsnorm"):
            raise NotApplicable("the release has no fused all-reduce")
        for anchor in self._anchors(tree):
            if "sm120" in code(anchor.node) or "sm12x" in code(anchor.node):
                raise AlreadyUpstream(f"{anchor.name} knows SM120")
            edit(tree, anchor, replace(_BOTH, "({} or SM12X_FUSION)", expected=1))
            ensure_import(tree, anchor.path, "from sglang.srt.sm120.allreduce import SM12X_FUSION")

    def check(self, tree: Tree) -> None:
        predicate = self._anchors(tree)[0]
        asked = _Asked(argument_defaults(tree.package_parent))
        for runs in (True, False):
            namespace = {
                "_is_flashinfer_available": True,
                "FUSE_ALLREDUCE_MAX_BATCH_SIZE": 2048,
                "is_dp_attention_enabled": lambda: False,
                "uses_cutedsl_ar_fusion": lambda: False,
                "is_flashinfer_allreduce_unavailable": lambda: False,
                "get_global_server_args": lambda: asked,
                "get_exec": lambda: asked,
                "SM12X_FUSION": runs,
            }
            if bool(isolated(tree, predicate.name, namespace)(16)) != runs:
                raise FailedCheck(
                    f"{predicate.name} is {not runs} on SM12x where the kernel {'runs' if runs else 'is missing'}"
                )

    def _anchors(self, tree: Tree) -> list[Anchor]:
        """The predicate of a launch and, where the release has it, the choice of the implementation."""
        name = next((name for name in self.PREDICATES if has(tree, name)), self.PREDICATES[0])
        anchors = [find(tree, name, parameters=("batch_size",))]
        if any("flashinfer_comm_fusion" in path for path in tree.files_defining(self.CHOICES)):
            anchors.append(find(tree, self.CHOICES, parameters=("backend",), near="flashinfer_comm_fusion"))
        return anchors


class _Asked:
    """Server arguments of a user who asked for the fusion and left the rest as the release has it.

    In either form that releases read them in: all in one object, or in parts that are attributes of it.
    """

    enable_flashinfer_allreduce_fusion = True
    flashinfer_allreduce_fusion_backend = "trtllm"

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults

    @property
    def comm(self) -> _Asked:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in self._defaults:
            raise AttributeError(f"the release has no argument {name} whose default can be read")
        return self._defaults[name]
