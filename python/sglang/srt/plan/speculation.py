"""Resolves the `--speculative-*` flags, once, for a model. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from sglang.srt.configs.speculative import (
    BLOCK_ALGORITHMS,
    EAGLE,
    NEXTN,
    NGRAM,
    AdaptiveSettings,
    NgramSettings,
    SpeculativeSettings,
    default_num_steps,
)
from sglang.srt.drafts.block.readers.trained import trained_block
from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.step_widths import ONE_TOKEN, StepWidths
from sglang.srt.server_args import ServerArgs

TREES_COUNTED = (
    "By a count of step times and acceptance a tree would gain where drafts are right in little more than half of"
    " cases, and nothing where they are right in 80%: see Depth in docs/speculative_decoding.md."
)


def speculative_settings(args: ServerArgs, architecture: str) -> SpeculativeSettings | None:
    """Resolves the flags for a model with this entry of `architectures`; None: nothing drafts. Raises UserError if the
    file of --speculative-adaptive-config cannot be used, or the draft is missing."""
    if args.speculative_algorithm is None:
        return None
    algorithm = EAGLE if args.speculative_algorithm == NEXTN else args.speculative_algorithm
    block = trained_block(args)
    usual = (block.draft_tokens or default_num_steps(algorithm, architecture)) + 1
    return SpeculativeSettings(
        algorithm=algorithm,
        num_draft_tokens=_block_tokens(args, usual) if block.rows else _num_draft_tokens(args, usual),
        block_size=block.rows,
        block_draft_tokens=block.draft_tokens,
        draft_path=args.speculative_draft_model_path,
        draft_revision=args.speculative_draft_model_revision,
        draft_load_format=args.speculative_draft_load_format or args.load_format,
        draft_quantization=args.speculative_draft_model_quantization,
        adaptive=_adaptive(args),
        ngram=NgramSettings(
            longest_suffix=args.speculative_ngram_max_trie_depth,
            corpus_max_tokens=args.speculative_ngram_external_corpus_max_tokens,
        ),
    )


def step_widths(settings: SpeculativeSettings | None) -> StepWidths:
    """Returns the numbers of tokens that a decoding request may bring to a step, without a limit of rows: (1,) without
    drafts."""
    return ONE_TOKEN if settings is None else StepWidths(settings.widths, settings.adaptive is not None)


def _block_tokens(args: ServerArgs, usual: int) -> int:
    """Returns k for drafts that propose a block in one pass, for which neither passes nor branches count."""
    for name, value in (("num-steps", args.speculative_num_steps), ("eagle-topk", args.speculative_eagle_topk)):
        if value is not None:
            warn_once(
                f"--speculative-{name} {value} has no effect: a {args.speculative_algorithm} draft proposes a block in"
                " one pass. --speculative-num-draft-tokens says how many tokens a step verifies."
            )
    draft_tokens = args.speculative_dspark_block_size
    asked = args.speculative_num_draft_tokens or args.speculative_dflash_block_size
    return asked or (draft_tokens + 1 if draft_tokens else usual)


def _num_draft_tokens(args: ServerArgs, usual: int) -> int:
    """Returns k, the tokens of a request in a step. The chain has the depth that the flags ask for, also where they ask
    for a tree. `usual`: k without flags."""
    steps, tokens, branches = (
        args.speculative_num_steps,
        args.speculative_num_draft_tokens,
        args.speculative_eagle_topk or 1,
    )
    if branches > 1:
        steps = steps or usual - 1
        warn_once(
            f"--speculative-eagle-topk {branches}: a chain of {steps} draft tokens is verified instead of a tree;"
            f" the answers are the same. {TREES_COUNTED}"
        )
        return steps + 1 if tokens is None else min(steps + 1, tokens)
    if steps is None:
        return tokens or usual
    if tokens is not None and tokens != steps + 1:
        warn_once(
            f"--speculative-num-draft-tokens {tokens} is read as {steps + 1}: --speculative-num-steps {steps} in a"
            " chain, and the token sampled last."
        )
    return steps + 1


def _adaptive(args: ServerArgs) -> AdaptiveSettings | None:
    """Returns the settings of the adaptive depth, which is on where a flag asks for it, or no flag sets a depth; else
    None."""
    path = args.speculative_adaptive_config
    depths = [args.speculative_num_draft_tokens, args.speculative_dflash_block_size, args.speculative_dspark_block_size]
    if args.speculative_algorithm not in BLOCK_ALGORITHMS:
        depths.append(args.speculative_num_steps)
    given = any(depth is not None for depth in depths)
    if path is None:
        return AdaptiveSettings() if args.speculative_adaptive or not given else None
    source = f"--speculative-adaptive-config {path}"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{source} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{source} must contain a JSON object such as {{'candidate_steps': [1, 3]}}.")
    return AdaptiveSettings.from_json(values, source)


def verify_needs(args: ServerArgs, dtype: str) -> tuple[Need, ...]:
    """Returns the needs of verify steps and of drafting, apart from those of a draft's layers."""
    if args.speculative_algorithm is None:
        return ()
    source = "ngram_drafts" if args.speculative_algorithm == NGRAM else "draft_inputs"
    return tuple(Need(op, q_dtype=dtype) for op in ("verify_inputs", "accept_drafts", source))
