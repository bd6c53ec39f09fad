"""DeepSeek-V4: sparse decode, indexer logits, and the choices that go with them."""

from __future__ import annotations

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck, NotApplicable
from upstream.changes.sparse_attention import DEEP_GEMM, FLASH_MLA, INDEXER_FILES, SPARSE_MLA_FILES, require_switches
from upstream.toolbox import Anchor, Moved, at_bottom, code, edit, ensure_import, find, has, replace, switch_imports
from upstream.tree import Tree

INDEXER = "C4IndexerBackendMixin"


def indexer(tree: Tree) -> Anchor:
    """The backend's part that scores compressed tokens. Raises NotApplicable."""
    if not any("deepseek_v4_backend" in path for path in tree.python_files()):
        raise NotApplicable("the release has no DeepSeek-V4")
    return find(tree, INDEXER, near="dsv4")


class V4Decode(Change):
    name = "v4-attention"
    title = "DeepSeek-V4 attention: Triton on SM12x behind FlashMLA's interface"
    why = (
        "FlashMLA has no SM12x kernels, and nothing else of this release reads the V4 cache. The sliding window, "
        "the compressed tokens and the sink are joined by our kernels, which read both caches where they lie."
    )
    merged = "flash_mla_with_kvcache_sm120 exists"
    files = ("hardware.py", "flash_mla.py", *SPARSE_MLA_FILES)

    def transform(self, tree: Tree) -> None:
        indexer(tree)
        if has(tree, "flash_mla_with_kvcache_sm120"):
            raise AlreadyUpstream("flash_mla_with_kvcache_sm120 serves it")
        if not switch_imports(tree, self._path(tree), {"flash_mla": "sglang.srt.sm120.flash_mla"}, FLASH_MLA):
            raise Moved(f"{self._path(tree)} no longer imports flash_mla")

    def check(self, tree: Tree) -> None:
        require_switches(tree, self._path(tree), "flash_mla")

    def _path(self, tree: Tree) -> str:
        return next(path for path in tree.python_files() if path.endswith("/deepseek_v4_backend.py"))


class V4Indexer(Change):
    name = "v4-indexer"
    title = "DeepSeek-V4 indexer: paged logits in Triton on SM12x"
    why = (
        "On SM12x the indexer scores tokens with torch, which gathers and widens the whole cache for every "
        "layer, or not at all. Our kernel reads the pages in place, with native float8 products."
    )
    merged = "the fallback in torch is gone"
    files = ("hardware.py", "deep_gemm.py", *INDEXER_FILES)

    FALLBACK = "fp8_paged_mqa_logits_torch_sm120"

    def transform(self, tree: Tree) -> None:
        anchor = indexer(tree)
        if has(tree, self.FALLBACK):
            module = "from sglang.srt.sm120.deep_gemm import fp8_paged_mqa_logits as fp8_paged_mqa_logits_sm120"
            edit(tree, anchor, replace(m.Name(self.FALLBACK), "fp8_paged_mqa_logits_sm120", expected=1))
            ensure_import(tree, anchor.path, module)
            return
        for path in self._paths(tree):
            if not switch_imports(tree, path, {"deep_gemm": "sglang.srt.sm120.deep_gemm"}, DEEP_GEMM):
                raise Moved(f"{path} no longer imports deep_gemm")

    def check(self, tree: Tree) -> None:
        if has(tree, self.FALLBACK):
            if f"fn = {self.FALLBACK}" in tree.text(indexer(tree).path):
                raise FailedCheck("the torch fallback is still chosen")
            return
        for path in self._paths(tree):
            require_switches(tree, path, "deep_gemm")

    def _paths(self, tree: Tree) -> list[str]:
        return [indexer(tree).path, find(tree, "PagedIndexerMetadata", near="dsv4").path]


class V4Arguments(Change):
    name = "v4-arguments"
    title = "DeepSeek-V4 on SM12x: no DeepGEMM, tilelang or 128 KiB top-k, experts by Marlin"
    why = (
        "The release turns on features that SM12x lacks the kernels or the shared memory for, and has no MXFP4 "
        "expert kernel for it. Weight-only Marlin serves the experts, and is no longer refused."
    )
    merged = "the arguments for DeepseekV4ForCausalLM have a branch for SM120"
    files = ("hardware.py",)

    HOOK = "apply_deepseek_v4_defaults"
    ARGUMENTS = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/")
    OFF = (
        "SGLANG_OPT_FP8_WO_A_GEMM",
        "SGLANG_OPT_USE_TOPK_V2",
        "SGLANG_OPT_USE_TILELANG_MHC_PRE",
        "SGLANG_OPT_USE_TILELANG_MHC_POST",
        "SGLANG_OPT_DEEPGEMM_HC_PRENORM",
        "SGLANG_OPT_USE_JIT_INDEXER_METADATA",
    )

    def transform(self, tree: Tree) -> None:
        indexer(tree)
        if self._has_branch(tree):
            raise AlreadyUpstream("the arguments have a branch for SM120")
        anchor = find(tree, self.HOOK, parameters=("server_args",))
        lines = [f"    sm120_envs.{name}.set(False)\n" for name in self.OFF if self._known(tree, name)]
        edit(
            tree,
            anchor,
            at_bottom(
                "if is_sm12x():\n"
                "    from sglang.srt.environ import envs as sm120_envs\n\n"
                + "".join(lines)
                + '    if server_args.moe_runner_backend == "auto":\n'
                '        server_args.moe_runner_backend = "marlin"\n'
            ),
        )
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.hardware import is_sm12x")
        self._allow_marlin(tree)

    def _has_branch(self, tree: Tree) -> bool:
        """Whether the release's arguments turn the top-k of 128 KiB off under a condition that names SM120."""
        off = "SGLANG_OPT_USE_TOPK_V2.set(False)"
        paths = [path for path in tree.python_files() if path.startswith(self.ARGUMENTS) and off in tree.text(path)]
        branches = [branch for path in paths for branch in m.findall(tree.module(path), m.If())]
        return any("sm120" in code(branch.test) and off in code(branch.body) for branch in branches)

    def _allow_marlin(self, tree: Tree) -> None:
        """Marlin is weight-only and runs from SM80 on; the check knows only the GPU that it was tried on."""
        method = find(tree, "Mxfp4MarlinMoEMethod", near="mxfp4_marlin_moe")
        hopper = m.UnaryOperation(operator=m.Not(), expression=m.Call(func=m.Name("is_sm90_supported")))
        if m.findall(method.node, hopper):
            edit(tree, method, replace(hopper, "not (is_sm90_supported() or is_sm12x())"))
            ensure_import(tree, method.path, "from sglang.srt.sm120.hardware import is_sm12x")

    def _known(self, tree: Tree, name: str) -> bool:
        return f"    {name} = " in tree.text("sglang/srt/environ.py")

    def check(self, tree: Tree) -> None:
        text = code(find(tree, self.HOOK).node)
        missing = [name for name in self.OFF if self._known(tree, name) and f"{name}.set(False)" not in text]
        if missing or '"marlin"' not in text:
            raise FailedCheck(f"left on: {missing}")
