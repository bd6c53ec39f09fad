"""Checks --preferred-sampling-params at the start, so that values which no request could use are refused early."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.compile_client import CompileClient
from sglang.srt.constrained.compile_process import setup_for
from sglang.srt.constrained.grammar import GrammarKey, grammar_key
from sglang.srt.errors import UserError
from sglang.srt.sampling.sampling_params import merge
from sglang.srt.server_args import ServerArgs

COMPILE_LIMIT_S = 120.0
"""Time limit in seconds for starting the process that compiles grammars, and for compiling one grammar."""


def check_server_defaults(args: ServerArgs, model_config: ModelConfig) -> None:
    """Raises UserError for invalid preferred sampling parameters."""
    model_defaults = model_config.default_sampling if args.sampling_defaults == "model" else {}
    try:
        params = merge({}, model_defaults, json.loads(args.preferred_sampling_params or "{}"))
        params.verify(model_config.vocab_size)
    except ValueError as error:
        raise UserError(f"--preferred-sampling-params: {error}") from None
    key = grammar_key(params)
    problem = "" if key is None else _grammar_problem(args, model_config, key)
    if problem:
        raise UserError(f"--preferred-sampling-params: {problem}")


def _grammar_problem(args: ServerArgs, model_config: ModelConfig, key: GrammarKey) -> str:
    """Returns the error message that a client would get for this grammar; empty for a good one."""
    with tempfile.TemporaryDirectory(prefix="sglang-grammar-") as directory:
        setup = setup_for(args, model_config, Path(directory) / "vocabulary")
        if setup is None:
            return f"a {key.kind} needs a tokenizer, and --grammar-backend other than none."
        client = CompileClient(setup)
        try:
            return client.submit(key).verdict.result(COMPILE_LIMIT_S).error
        except TimeoutError:
            return f"the {key.kind} was not compiled within {COMPILE_LIMIT_S:g} s; simplify it."
        finally:
            client.close()
