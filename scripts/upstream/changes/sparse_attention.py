"""DeepSeek sparse attention (NSA, later DSA): indexer, top-k and attention without DeepGEMM, FlashMLA and tilelang."""

from __future__ import annotations

from typing import Any

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck, NotApplicable
from upstream.toolbox import Anchor, Moved, at_top, code, edit, ensure_import, find, has, replace, switch_imports
from upstream.tree import Tree

BACKENDS = ("DeepseekSparseAttnBackend", "NativeSparseAttnBackend")
SM12X = "from sglang.srt.sm120.hardware import is_sm12x"
DEEP_GEMM = ("get_num_sms", "get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits", "fp8_mqa_logits")
FLASH_MLA = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")
INDEXER_FILES = ("index_logits.py", "attention_parts.py", "selection.py", "pdl.py")
SPARSE_MLA_FILES = (
    "sparse_attention.py", "sparse_packed.py", "sparse_steps.py", "entry_shares.py", "attention_parts.py",
    "selection.py", "pdl.py",
)  # fmt: skip
"""Of the server, with what they import."""
TOPK = ("fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused")


def backend(tree: Tree) -> Anchor:
    """The attention backend, under whichever name. Raises NotApplicable."""
    for name in BACKENDS:
        if has(tree, name):
            return find(tree, name)
    raise NotApplicable("the release has no DSA")


def require_switches(tree: Tree, path: str, module: str) -> None:
    """Raises FailedCheck unless the file imports from our `module`, which it does on SM12x only."""
    if f"sglang.srt.sm120.{module}" not in tree.text(path).replace("sm120 import ", "sm120."):
        raise FailedCheck(f"{path} does not use {module} on SM12x")


class IndexerLogits(Change):
    name = "dsa-indexer"
    title = "DSA indexer: logits in Triton on SM12x instead of DeepGEMM"
    why = (
        "DeepGEMM of this release has no SM12x kernels: its import or its first call fails. The logits of the "
        "indexer, paged and ragged, come from our Triton kernels there, in native float8 products."
    )
    merged = "the release has, or checks for, DeepGEMM kernels for SM120 (_sm120_deep_gemm_apis_available)"
    files = ("hardware.py", "deep_gemm.py", *INDEXER_FILES)

    def transform(self, tree: Tree) -> None:
        paths = self._paths(tree)
        if has(tree, "_sm120_deep_gemm_apis_available"):
            raise AlreadyUpstream("DeepGEMM of this release has SM120 kernels, and a torch fallback stands in for them")
        for path in paths:
            if not switch_imports(tree, path, {"deep_gemm": "sglang.srt.sm120.deep_gemm"}, DEEP_GEMM):
                raise Moved(f"{path} no longer imports deep_gemm")
        anchor = find(tree, "Indexer._with_real_sm_count", near="/attention/")
        edit(
            tree,
            anchor,
            at_top("if is_sm12x():  # nothing to configure: the kernels are not persistent\n    yield\n    return\n"),
        )

    def check(self, tree: Tree) -> None:
        for path in self._paths(tree):
            require_switches(tree, path, "deep_gemm")

    def _paths(self, tree: Tree) -> list[str]:
        return [backend(tree).path, find(tree, "Indexer", near="/attention/").path]


class SparseMla(Change):
    name = "dsa-attention"
    title = "DSA attention: Triton on SM12x behind FlashMLA's interface"
    why = (
        "FlashMLA has no SM12x kernels. Its sparse prefill and its decode over the float8 cache run in Triton "
        "there, and no heads are added to reach the multiples that FlashMLA needs."
    )
    merged = "flashmla_sparse and flashmla_kv run on SM120"
    files = ("hardware.py", "flash_mla.py", *SPARSE_MLA_FILES)

    MODULES = ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface")

    def transform(self, tree: Tree) -> None:
        anchor = backend(tree)
        class_name = anchor.name
        if not switch_imports(tree, anchor.path, dict.fromkeys(self.MODULES, "sglang.srt.sm120.flash_mla"), FLASH_MLA):
            raise Moved(f"{anchor.path} no longer imports FlashMLA from {' or '.join(self.MODULES)}")
        padding: Any = m.IfExp() & m.MatchIfTrue(lambda node: "device_sm_major" in code(node.test))
        edit(
            tree,
            find(tree, f"{class_name}._forward_flashmla_sparse", parameters=("q_all", "kv_cache", "page_table_1")),
            replace(padding, "(num_heads if is_sm12x() else ({}))", expected=1),
        )
        decode = find(tree, f"{class_name}._forward_flashmla_kv", parameters=("q_all", "kv_cache", "page_table_1"))
        target = m.Attribute(value=m.Name("self"), attr=m.Name("flashmla_kv_num_q_heads"))
        if m.findall(decode.node, target):  # earlier releases add no heads here
            edit(tree, decode, replace(target, "(num_q_heads if is_sm12x() else {})", expected=1))

    def check(self, tree: Tree) -> None:
        require_switches(tree, backend(tree).path, "flash_mla")


class IndexerTopK(Change):
    name = "dsa-topk"
    title = "DSA top-k on SM12x: in registers, without a sort"
    why = "The top-k kernels of sgl_kernel and of the JIT take 128 KiB of shared memory a block; SM12x has 99 KiB."
    merged = "the top-k of DSA fits SM120, or is chosen by shared memory"
    files = ("hardware.py", "topk.py", "select_entries.py", "selection.py", "pdl.py")

    def transform(self, tree: Tree) -> None:
        path = self._path(tree)
        if not switch_imports(tree, path, {"sgl_kernel": "sglang.srt.sm120.topk"}, TOPK):
            raise Moved(f"{path} no longer imports {TOPK[0]} from sgl_kernel")
        newer = m.Call(func=m.Attribute(value=m.Attribute(attr=m.Name("SGLANG_OPT_USE_TOPK_V2")), attr=m.Name("get")))
        for file in {path, backend(tree).path}:
            for name in _functions_with(tree, file, "SGLANG_OPT_USE_TOPK_V2"):
                edit(tree, find(tree, name, near=file), replace(newer, "({} and not is_sm12x())"))
                ensure_import(tree, file, SM12X, first=True)

    def check(self, tree: Tree) -> None:
        path = self._path(tree)
        require_switches(tree, path, "topk")
        for file in {path, backend(tree).path}:
            text = tree.text(file)
            if text.count("envs.SGLANG_OPT_USE_TOPK_V2.get()") != text.count(
                "(envs.SGLANG_OPT_USE_TOPK_V2.get() and not is_sm12x())"
            ):
                raise FailedCheck(f"{file} takes the kernel of 128 KiB on SM12x")

    def _path(self, tree: Tree) -> str:
        """Where the top-k is called: a file of its own from 0.5.15 on."""
        here = backend(tree).path
        return find(tree, "DSATopKBackend").path if has(tree, "DSATopKBackend") else here


class ContextParallelIndexer(Change):
    name = "dsa-context-parallel"
    title = "DSA with context parallelism on SM12x: refuse with a reason"
    why = (
        "The indexer's context-parallel path was written for NVLink machines and DeepGEMM, and has not run on "
        "SM12x. It says so when it is entered instead of failing inside a kernel."
    )
    merged = "the context-parallel indexer of this form is gone, or runs on SM120"
    files = ("hardware.py",)

    METHOD = "Indexer._get_topk_ragged_with_cp"

    def transform(self, tree: Tree) -> None:
        backend(tree)
        if not has(tree, "_get_topk_ragged_with_cp"):
            raise NotApplicable("the release has another context parallelism")
        anchor = find(tree, self.METHOD, near="/attention/")
        edit(
            tree,
            anchor,
            at_top(
                "if is_sm12x():\n"
                "    raise NotImplementedError(\n"
                '        "Sparse attention with context parallelism does not run on SM12x GPUs; start without it, "\n'
                '        "with --tp-size for several GPUs."\n'
                "    )\n"
            ),
        )
        ensure_import(tree, anchor.path, SM12X, first=True)

    def check(self, tree: Tree) -> None:
        if "NotImplementedError" not in code(find(tree, self.METHOD, near="/attention/").node.body.body[0]):
            raise FailedCheck("the method does not begin by refusing SM12x")


def _functions_with(tree: Tree, path: str, text: str) -> list[str]:
    """Dotted names of the functions and methods of a file that contain `text`."""
    found: list[str] = []
    statement: Any
    for statement in tree.module(path).body:
        if m.matches(statement, m.FunctionDef()) and text in code(statement):
            found.append(statement.name.value)
        elif m.matches(statement, m.ClassDef()):
            methods: Any = m.findall(statement.body, m.FunctionDef())
            found += [f"{statement.name.value}.{method.name.value}" for method in methods if text in code(method)]
    return found
