"""MXFP4 experts through triton_kernels (GPT-OSS)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from upstream.change import AlreadyUpstream, Change, FailedCheck
from upstream.own_files import own
from upstream.toolbox import after_assignment, code, edit, ensure_import, find, isolated
from upstream.tree import Tree


class Mxfp4Layout(Change):
    name = "mxfp4-layout"
    title = "MXFP4 experts: strided layout, not persistent, one stage on SM12x"
    why = (
        "triton_kernels chooses by capability and takes SM12x for an SM100: a scale layout that only the "
        "persistent TMA kernel reads, which SM12x cannot run. The plain layout and one stage fit."
    )
    merged = "_swizzle_mxfp4 has a branch for SM120"
    files = ("hardware.py", "mxfp4_layout.py")

    function = "_swizzle_mxfp4"

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("quant_tensor", "scale", "num_warps"))
        if "sm120" in code(anchor.node):
            raise AlreadyUpstream("it has a branch for SM120")
        edit(
            tree,
            anchor,
            after_assignment(
                "scale_layout_opts",
                "if is_sm12x():\n"
                "    value_layout, value_layout_opts, scale_layout, scale_layout_opts = strided_layouts(\n"
                "        layout, opt_flags, num_warps\n"
                "    )\n",
            ),
        )
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.hardware import is_sm12x")
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.mxfp4_layout import strided_layouts")

    def check(self, tree: Tree) -> None:
        for sm12x in (True, False):
            used, constraints = self._run(tree, sm12x)
            if (used == {"strided"}) != sm12x:
                raise FailedCheck(f"{'on' if sm12x else 'off'} SM12x the layouts are {sorted(used)}")
            if sm12x and constraints.get("is_persistent") is not False:
                raise FailedCheck("the persistent kernel is not ruled out")

    def _run(self, tree: Tree, sm12x: bool) -> tuple[set[str], dict[str, Any]]:
        """Layouts that the function converts to, and constraints that it sets, over stubs of triton_kernels."""
        used: set[str] = set()
        constraints: dict[str, Any] = {}
        opt_flags = SimpleNamespace(update_opt_flags_constraints=constraints.update)
        returns_pairs = "value_layout, value_layout_opts =" in code(find(tree, self.function).node)
        default: Any = ("swizzled", {}) if returns_pairs else "swizzled"
        layout = SimpleNamespace(
            StridedLayout="strided" if returns_pairs else lambda dimension: "strided",
            make_default_matmul_mxfp4_w_layout=lambda **kwargs: default,
            make_default_matmul_mxfp4_w_scale_layout=lambda **kwargs: default,
        )

        def convert(tensor: Any, layout: str, **kwargs: Any) -> Any:
            used.add(layout)
            return tensor

        function = isolated(
            tree,
            self.function,
            {
                "is_sm12x": lambda: sm12x,
                "strided_layouts": own("mxfp4_layout").strided_layouts,
                "opt_flags": opt_flags,
                "layout": layout,
                "convert_layout": convert,
                "wrap_torch_tensor": lambda tensor, **kwargs: tensor,
            },
            imports=False,
        )
        tensor = SimpleNamespace(transpose=lambda *args: None, shape=(8, 64))
        function(tensor, tensor, 8)
        return used, constraints
