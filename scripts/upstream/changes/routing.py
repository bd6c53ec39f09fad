"""Which backend serves what: the choices that ServerArgs makes by capability."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck, NotApplicable
from upstream.toolbox import Anchor, Anything, Moved, at_top, code, edit, ensure_import, find, has, isolated, replace
from upstream.tree import Tree

SM12X = "from sglang.srt.sm120.hardware import is_sm12x"


class DefaultBackend(Change):
    name = "default-backend"
    title = "Default attention backend on SM12x: flashinfer or triton"
    why = (
        "trtllm-gen kernels exist for SM100 only. Whatever the release picks by default must not be trtllm on "
        "SM12x; HiCache and hybrid models follow this choice."
    )
    merged = "the default for capability 12 is flashinfer or triton, for MHA and MLA"
    files = ("hardware.py",)

    CHOOSERS = ("get_default_attn_backend", "ServerArgs._get_default_attn_backend")
    HANDLER = "ServerArgs._handle_attention_backend_compatibility"

    def transform(self, tree: Tree) -> None:
        chosen = {mla: self._default(tree, mla) for mla in (False, True)}
        if not any("trtllm" in backend for backend in chosen.values()):
            raise AlreadyUpstream(f"MHA takes {chosen[False]}, MLA {chosen[True]}; HiCache and Mamba follow them")
        anchor = self._chooser(tree)
        edit(tree, anchor, at_top('if is_sm12x():\n    return "triton" if use_mla_backend else "flashinfer"\n'))
        ensure_import(tree, anchor.path, SM12X)

    def check(self, tree: Tree) -> None:
        if any("trtllm" in self._default(tree, mla) for mla in (False, True)):
            raise FailedCheck("trtllm is still a default on SM12x")

    def _chooser(self, tree: Tree) -> Anchor:
        for name in self.CHOOSERS:
            try:
                return find(tree, name, parameters=("use_mla_backend", "model_config"))
            except Moved:
                continue
        return find(tree, self.HANDLER)

    def _default(self, tree: Tree, mla: bool) -> str:
        """The default for a user who names no backend, on a machine where nothing but SM12x and FlashInfer is true."""
        arguments = _Arguments(mla)
        platform = SimpleNamespace(is_sm120=True, is_blackwell=True, has_flashinfer=True)
        namespace = {
            "is_sm12x": lambda: True,
            "is_sm120_supported": lambda: True,
            "is_blackwell_supported": lambda: True,
            "is_flashinfer_available": lambda: True,
            "get_platform": lambda: _Known(platform),
        }
        config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], dual_chunk_attention_config=None)
        model = _Known(SimpleNamespace(hf_config=_Known(config)))
        arguments.get_model_config = lambda: model
        chooser = self._chooser(tree)
        function = isolated(tree, chooser.name, namespace, imports=False)
        if chooser.name != self.HANDLER:
            return str(function(arguments, mla, model))
        function(arguments)
        return str(arguments.attention_backend)


class _Known(Anything):
    """Answers as `values` says, and false for everything else."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._values, name) if hasattr(self._values, name) else super().__getattr__(name)


class _Arguments(Anything):
    """ServerArgs of a user who named no backend."""

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    speculative_algorithm: str | None = None
    page_size: int | None = None

    def __init__(self, mla: bool) -> None:
        self.use_mla_backend = lambda: mla


class TrtllmMlaPrefill(Change):
    name = "trtllm-mla-prefill"
    title = "trtllm_mla cannot prefill on SM12x: say so at start-up"
    why = (
        "is_blackwell() is true on SM12x, so the backend passes the check and fails at the first prompt: its "
        "prefill kernels need tcgen05. Decode alone works there, through XQA."
    )
    merged = "the check of trtllm_mla distinguishes SM100 from SM12x"
    files = ("hardware.py",)

    PASS = "_mla_kv_cache_dtype_checks"
    HANDLER = "ServerArgs._handle_attention_backend_compatibility"

    def transform(self, tree: Tree) -> None:
        anchor, owner = (
            (find(tree, self.PASS, parameters=("view",)), "view")
            if has(tree, self.PASS)
            else (find(tree, self.HANDLER), "self")
        )
        if "trtllm_mla" not in code(anchor.node):
            raise Moved(f"{anchor.name} no longer checks trtllm_mla ({anchor.path})")
        if not m.findall(
            anchor.node, m.OneOf(m.Name("is_blackwell_supported"), m.Attribute(attr=m.Name("is_blackwell")))
        ):
            raise AlreadyUpstream("trtllm_mla is not accepted for all of Blackwell")
        text = (
            f'if is_sm12x() and ({owner}.prefill_attention_backend or {owner}.attention_backend) == "trtllm_mla":\n'
            "    raise ValueError(\n"
            '        "trtllm_mla cannot prefill on SM12x GPUs: its kernels need tcgen05. Use --attention-backend "\n'
            '        "triton or flashinfer; --decode-attention-backend trtllm_mla alone is possible."\n'
            "    )\n"
        )
        edit(tree, anchor, at_top(text))
        ensure_import(tree, anchor.path, SM12X)

    def check(self, tree: Tree) -> None:
        anchor = find(tree, self.PASS if has(tree, self.PASS) else self.HANDLER)
        platform = _Known(SimpleNamespace(is_blackwell=True))
        for sm12x, prefill, refused in ((True, None, True), (False, None, False), (True, "triton", False)):
            arguments = _Arguments(mla=True)
            arguments.attention_backend, arguments.prefill_attention_backend = "trtllm_mla", prefill
            arguments.kv_cache_dtype, arguments.page_size = "auto", 64
            namespace: dict[str, Any] = {"is_blackwell_supported": lambda: True, "get_platform": lambda: platform}
            namespace["is_sm12x"] = (lambda: True) if sm12x else (lambda: False)
            try:
                isolated(tree, anchor.name, namespace, imports=False)(arguments)
                raised = False
            except Exception as error:  # what follows in the function may fail for want of a real ServerArgs
                raised = "tcgen05" in str(error)
            if raised != refused:
                where, what = "on" if sm12x else "off", "refused" if raised else "accepted"
                raise FailedCheck(f"trtllm_mla with prefill by {prefill} {where} SM12x is {what}")


class DsaBackends(Change):
    name = "dsa-backends"
    title = "DeepSeek sparse attention on SM12x: FlashMLA's interface, not trtllm"
    why = (
        "Every capability from 10 on gets trtllm for DSA, whose kernels exist for SM100 only. SM12x takes the "
        "choice of Hopper, flashmla_kv for float8 and flashmla_sparse for bfloat16, which the kernels added here "
        "serve (change dsa-attention)."
    )
    merged = "DSA defaults for capability 12 are not trtllm, for every model"

    CHOOSERS = ("_dsa_split_backend_resolution", "ServerArgs._set_default_nsa_backends")

    def transform(self, tree: Tree) -> None:
        chooser = self._chooser(tree)
        if "trtllm" not in code(chooser.node):
            raise AlreadyUpstream("trtllm is not a default of DSA")
        at_least_10 = m.Comparison(
            left=m.Name("major"),
            comparisons=[m.ComparisonTarget(operator=m.GreaterThanEqual(), comparator=m.Integer("10"))],
        )
        fa3 = m.SimpleString('"fa3"')
        edit(
            tree,
            chooser,
            replace(at_least_10, "10 <= major < 12"),
            replace(fa3, '("flashmla_sparse" if major == 12 else {})', expected=1),
        )

    def check(self, tree: Tree) -> None:
        for major, dtype in ((12, "fp8_e4m3"), (12, "bfloat16"), (10, "fp8_e4m3"), (9, "bfloat16")):
            chosen = self._run(tree, major, dtype)
            if major == 12 and (chosen & {"trtllm", "fa3"} or not chosen):
                raise FailedCheck(f"capability 12 with {dtype} gets {sorted(chosen)}")
            if (major == 10 and "trtllm" not in chosen) or (major == 9 and "fa3" not in chosen):
                raise FailedCheck(f"capability {major} with {dtype} gets {sorted(chosen)}")

    def _chooser(self, tree: Tree) -> Anchor:
        if not has(tree, "NativeSparseAttnBackend", "DeepseekSparseAttnBackend"):
            raise NotApplicable("the release has no DSA")
        if has(tree, self.CHOOSERS[0]):
            return find(tree, self.CHOOSERS[0], parameters=("view",))
        if not has(tree, "_set_default_nsa_backends") and has(tree, "NativeSparseAttnBackend"):
            raise NotApplicable("DSA takes flashmla on every GPU, which the change dsa-attention serves")
        return find(tree, self.CHOOSERS[1], parameters=("kv_cache_dtype", "major"))

    def _run(self, tree: Tree, major: int, dtype: str) -> set[str]:
        """The backends that prefill and decode get."""
        chooser = self._chooser(tree)
        view = _Arguments(mla=True)
        view.kv_cache_dtype, view.enable_hisparse = dtype, False
        for name in ("dsa_prefill_backend", "dsa_decode_backend", "nsa_prefill_backend", "nsa_decode_backend"):
            setattr(view, name, None)
        config = _Known(SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], learnable_sink=False))
        view.get_model_config = lambda: SimpleNamespace(hf_config=config)
        cuda = SimpleNamespace(get_device_capability=lambda: (major, 0))
        namespace = {
            "torch": SimpleNamespace(cuda=cuda),
            "_DEEPSEEK_FAMILY_ARCHS": {"DeepseekV32ForCausalLM"},
            "is_deepseek_dsa": lambda config: True,
            "model_config_of": lambda view: view.get_model_config(),
        }
        function = isolated(tree, chooser.name, namespace, imports=False)
        if chooser.name == self.CHOOSERS[0]:
            return set(function(view).values())
        function(view, dtype, major)
        return {view.nsa_prefill_backend, view.nsa_decode_backend}
