"""Chooses the kernel that serves each op of a model; flags may name some.

A flag that names a kernel is only a wish: if that kernel cannot serve the model here, the first one that can does, and
a note says so. With --strict-backends it is an error instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sglang.srt.environ import envs
from sglang.srt.flag_checks import ONE_SAMPLER, OUR_SAMPLING
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.conditions import SCALED_MM_SCHEMES
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import Choice, Need, NoKernel
from sglang.srt.kernels.tables import TABLES
from sglang.srt.plan.measured_choices import measured_choice
from sglang.srt.server_args import ServerArgs

INSTALL = {
    "flashinfer": "pip install 'flashinfer-python>=0.6.12,<0.8'",
    "sm120_sgl_kernel": "pip install ./sgl-kernel",
    "triton": "pip install 'triton>=3.6'",
}
"""Commands that install optional packages."""
REFERENCE = "torch_native"
CHOSEN_BY_TOKEN = ("sparse_attention", "selected_block_attention")
"""Attention ops without a backend that plans a step: the entries to attend to are selected for each token."""
SPARSE_NAMES = ("dsa", "nsa")
"""Names in --attention-backend of attention with an indexer; for a model with one they ask for no
particular kernel."""
STRICT = "--strict-backends makes this an error"


@dataclass(frozen=True, slots=True)
class Asked:
    """A kernel that a flag names."""

    flag: str
    kernel: str

    def __str__(self) -> str:
        return f"{self.flag} {self.kernel}"


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """The outcomes of all needs, in order: a Choice, or NoKernel with the reasons; and notes about flags whose kernel
    cannot serve."""

    outcomes: tuple[Choice | NoKernel, ...]
    notes: tuple[str, ...]

    def by_key(self) -> dict[str, Choice]:
        """Returns one Choice for each need, by its key. Raises NoKernel for the first need without one."""
        for outcome in self.outcomes:
            if isinstance(outcome, NoKernel):
                raise outcome
        return self.chosen()

    def chosen(self) -> dict[str, Choice]:
        """Returns the Choice of each need that has one, by its key."""
        return {outcome.need.key: outcome for outcome in self.outcomes if isinstance(outcome, Choice)}


def choose_kernels(
    args: ServerArgs,
    needs: Sequence[Need],
    arch: ArchTraits,
    packages: frozenset[str],
    measured: MeasuredChoices = NOT_MEASURED,
) -> KernelChoices:
    """Chooses a kernel for each need: that of a flag, else what was measured to be fastest here, else the first of the
    table. With --strict-backends a kernel that a flag names and that cannot serve is a NoKernel."""
    ledger = Ledger.load()

    def outcome(need: Need, asked: Asked | None) -> Choice | NoKernel:
        try:
            choice = resolve(need, arch, ledger, packages, asked.kernel if asked else None)
        except NoKernel as none:
            return none
        if not measured.by_question or (asked is not None and choice.tile is None):
            return choice
        return measured_choice(choice, arch, measured, lambda need, name: resolve(need, arch, ledger, packages, name))

    asked = {need: asked_kernel(args, need) for need in needs}
    if any(need.op == "sparse_attention" for need in needs):
        asked |= {need: None for need, named in asked.items() if named is not None and named.kernel in SPARSE_NAMES}
    outcomes = {need: outcome(need, asked[need]) for need in needs}
    outcomes |= _choose_long_prompts(outcomes, asked, outcome)
    if args.strict_backends:
        return KernelChoices(tuple(outcomes.values()), ())
    refusals: dict[Need, NoKernel] = {}
    for need in needs:
        refusal = outcomes[need]
        if asked[need] is not None and isinstance(refusal, NoKernel):
            # One backend computes all shapes of an op, so none of them keeps the refused one.
            refusals |= {other: refusal for other in needs if other.op == need.op and asked[other] == asked[need]}
    outcomes |= {need: outcome(need, None) for need in refusals}
    return KernelChoices(tuple(outcomes.values()), tuple(_notes(args, asked, outcomes, refusals)))


LONG_OPS = {"extend_attention": "long_prompt_attention", "latent_prompt_attention": "long_latent_prompt"}


def long_prompt_need(need: Need) -> Need:
    """Returns the need of long prompts that belongs to a need of prompts. Only layers that see all tokens use it, so
    chunked windows of other layers do not matter."""
    return replace(need, op=LONG_OPS[need.op], traits=need.traits - {"chunked"})


def _choose_long_prompts(
    outcomes: Mapping[Need, Choice | NoKernel],
    asked: Mapping[Need, Asked | None],
    outcome: Callable[[Need, Asked | None], Choice | NoKernel],
) -> dict[Need, Choice | NoKernel]:
    """Returns kernels that serve long prompts better than those which CUDA graphs hold, or which expand latents, where
    there are any and no flag names another."""
    named = {asked[need] for need in outcomes if need.op == "extend_attention" and "mla" in need.traits}
    latents_are_free = all(each is None or each.kernel == "flashinfer" for each in named)

    def replaced(need: Need, chosen: Choice | NoKernel) -> bool:
        if need.op == "latent_prompt_attention":
            return isinstance(chosen, Choice) and latents_are_free
        in_graphs = isinstance(chosen, Choice) and chosen.spec.graph_prefill
        return need.op == "extend_attention" and in_graphs and asked[need] is None

    of_long = [outcome(long_prompt_need(need), None) for need, chosen in outcomes.items() if replaced(need, chosen)]
    return {chosen.need: chosen for chosen in of_long if isinstance(chosen, Choice)}


def asked_kernel(args: ServerArgs, need: Need) -> Asked | None:
    """Returns the kernel that a flag or variable names for this need; None: any."""
    attention = Asked("--attention-backend", args.attention_backend or "auto")
    prefill, decode = args.prefill_attention_backend, args.decode_attention_backend
    named = {
        "extend_attention": Asked("--prefill-attention-backend", prefill) if prefill else attention,
        "decode_attention": Asked("--decode-attention-backend", decode) if decode else attention,
        "sparse_attention": _asked_sparse(args),
        **dict.fromkeys(("kv_compressor", "shared_kv_norm_rope_store", "tail_rotation"), _asked_entries()),
        "selected_block_attention": _asked_entries(),
        "hyper_connection": _asked_mixing(),
        "sparse_indexer": Asked("SGLANG_SM120_MQA_FALLBACK=1", REFERENCE) if envs.SGLANG_SM120_MQA_FALLBACK else None,
        "fused_moe": Asked("--moe-runner-backend", args.moe_runner_backend),
        "linear": Asked("--fp8-gemm-backend", args.fp8_gemm_backend) if need.quant in SCALED_MM_SCHEMES else None,
    }.get(need.op)
    return None if named is None or named.kernel == "auto" else named


def _asked_sparse(args: ServerArgs) -> Asked | None:
    """Returns the kernel that a flag names for attention to selected tokens; one kernel serves prompts and decode."""
    if not envs.SGLANG_SM120_TRITON_FLASHMLA:
        return Asked("SGLANG_SM120_TRITON_FLASHMLA=0", REFERENCE)
    if args.dsa_decode_backend is not None:
        return Asked("--dsa-decode-backend", args.dsa_decode_backend)
    return None if args.dsa_prefill_backend is None else Asked("--dsa-prefill-backend", args.dsa_prefill_backend)


def _asked_entries() -> Asked | None:
    """Returns the reference kernel where a variable asks for it, for DeepSeek-V4's ops besides attention and for
    attention to selected blocks."""
    return None if envs.SGLANG_SM120_TRITON_FLASHMLA else Asked("SGLANG_SM120_TRITON_FLASHMLA=0", REFERENCE)


def _asked_mixing() -> Asked | None:
    """Returns the reference kernel of hyper-connections where either variable asks for it: one op mixes before and
    after a block."""
    for name in ("SGLANG_OPT_USE_TILELANG_MHC_PRE", "SGLANG_OPT_USE_TILELANG_MHC_POST"):
        if not getattr(envs, name):
            return Asked(f"{name}=0", REFERENCE)
    return None


def _notes(
    args: ServerArgs,
    asked: dict[Need, Asked | None],
    outcomes: dict[Need, Choice | NoKernel],
    refusals: dict[Need, NoKernel],
) -> Iterator[str]:
    """Yields one note for each flag."""
    if args.sampling_backend not in OUR_SAMPLING:
        yield f"--sampling-backend {args.sampling_backend} has no effect ({ONE_SAMPLER}); {STRICT}"
    yield from _without_backends(args, outcomes)
    for named in dict.fromkeys(asked[need] for need in refusals):
        assert named is not None
        needs = [need for need in refusals if asked[need] == named]
        served = [outcome for outcome in (outcomes[need] for need in needs) if isinstance(outcome, Choice)]
        if not served:
            continue  # the NoKernel errors of these needs say why
        why = "; ".join(dict.fromkeys(reason for need in needs for reason in _reasons(refusals[need], named)))
        kernels = " and ".join(dict.fromkeys(choice.name for choice in served))
        ops = " and ".join(dict.fromkeys(choice.need.op for choice in served))
        yield f"{named} cannot serve this model here ({why}): {kernels} serves {ops} instead; {STRICT}"


def _without_backends(args: ServerArgs, outcomes: dict[Need, Choice | NoKernel]) -> Iterator[str]:
    """Yields a note if a flag names a backend for a model whose attention needs none (DeepSeek-V4,
    Qwen3.8-Flash-Next)."""
    ops = {need.op for need in outcomes}
    sparse = next((outcome for need, outcome in outcomes.items() if need.op in CHOSEN_BY_TOKEN), None)
    if not isinstance(sparse, Choice) or ops & {"extend_attention", "decode_attention"}:
        return
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        name = getattr(args, flag)
        if name not in (None, "auto", sparse.name):
            option = flag.replace("_", "-")
            yield f"--{option} {name} has no effect for this model: {sparse.name} serves {sparse.need.op}"


def _reasons(refusal: NoKernel, named: Asked) -> tuple[str, ...]:
    """Returns why the kernel of this name cannot serve, with the command that would install it where only that is
    missing."""
    if named.kernel not in {name for spec in TABLES[refusal.need.op] for name in (spec.name, spec.asked_as)}:
        return ("it is not part of sm120-sglang",)
    # Several kernels may have the name, for other kinds of attention: the fewest reasons belong to the one meant.
    reasons = min((rejection.reasons for rejection in refusal.rejected), key=len)
    installs = {f"{package} is not installed": line for package, line in INSTALL.items()}
    if len(reasons) == 1:
        return tuple(f"{reason}: {installs[reason]}" if reason in installs else reason for reason in reasons)
    return tuple(reason for reason in reasons if reason not in installs)
