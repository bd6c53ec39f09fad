"""MXFP8 expert weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck, NotApplicable
from upstream.toolbox import code, edit, ensure_import, find, has, isolated, replace
from upstream.tree import Tree

SM12X = "from sglang.srt.sm120.hardware import is_sm12x"


class Mxfp8Experts(Change):
    name = "mxfp8-experts"
    title = "MXFP8 experts on SM12x: as blockwise FP8, by Triton"
    why = (
        "The runner chosen for MXFP8 experts has SM100 kernels only, and loading raises. The release can turn "
        "such weights into blockwise FP8 at load, for another GPU without MX products; SM12x takes that way, and "
        "the Triton runner."
    )
    merged = "MXFP8 experts load on SM120"
    files = ("hardware.py",)

    METHOD = "Fp8MoEMethod.__init__"
    CHOOSER = "_moe_runner_backend_quant_constraints"
    LOADER = "Fp8MoEMethod._process_mxfp8_moe_weights"

    def transform(self, tree: Tree) -> None:
        if not has(tree, "convert_mxfp8_weight_to_block_fp8"):
            raise NotApplicable("the release cannot turn MXFP8 experts into blockwise FP8")
        if "sm120" in code(find(tree, self.LOADER).node):
            raise AlreadyUpstream("MXFP8 experts load on SM120")
        method = find(tree, self.METHOD, parameters=("quant_config",))
        required = "({} or (is_sm12x() and self.quant_config.is_checkpoint_fp8_serialized))"
        edit(tree, method, replace(m.Name("_mxfp8_to_block_fp8_required"), required, expected=1))
        ensure_import(tree, method.path, SM12X)
        chooser = find(tree, self.CHOOSER, parameters=("view",))
        default: Any = m.IfExp(orelse=m.SimpleString('"flashinfer_trtllm"')) & m.MatchIfTrue(
            lambda node: "mxfp8" in code(node.test)
        )
        edit(tree, chooser, replace(default, '("triton" if is_sm12x() else ({}))', expected=1))
        ensure_import(tree, chooser.path, SM12X)

    def check(self, tree: Tree) -> None:
        for sm12x, asked, runner in (
            (True, "auto", "triton"),
            (False, "auto", "flashinfer_trtllm"),
            (True, "cutlass", "cutlass"),
        ):
            namespace = {"is_sm12x": lambda sm12x=sm12x: sm12x, "MXFP8_MOE_RUNNER_BACKEND_CHOICES": ["cutlass"]}
            view = SimpleNamespace(quantization="mxfp8", moe_runner_backend=asked, moe_a2a_backend="none")
            chosen = isolated(tree, self.CHOOSER, namespace, imports=False)(view)
            if chosen.get("moe_runner_backend", asked) != runner:
                raise FailedCheck(f"{asked} {'on' if sm12x else 'off'} SM12x becomes {chosen}")
        if "is_sm12x()" not in code(find(tree, self.METHOD).node):
            raise FailedCheck("the weights are not converted on SM12x")
