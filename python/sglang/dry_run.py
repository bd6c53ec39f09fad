"""`sglang serve --dry-run`: everything that a start decides, without reading weights or starting a process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from sglang.explain import explain, to_text
from sglang.plan.measured_times import measured_choices
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.built_in_templates import model_template
from sglang.srt.entrypoints.openai.chat_template import read_template_file
from sglang.srt.entrypoints.openai.template_pool import TemplatePool
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import current_arch, device_count, free_memory_bytes
from sglang.srt.kernels.resolve import installed_packages
from sglang.srt.managers.front.tokenizer_trial import TokenizerTrial
from sglang.srt.plan.layout import asked_node, check_gpus
from sglang.srt.plan.plan import make_plan
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer


def dry_run(args: ServerArgs) -> None:
    """Prints the plan for this machine. Raises UserError where a server would not start.

    SGLANG_FORCE_ARCH plans for another GPU, on a machine without one for all of its memory."""
    arch, packages, node = current_arch(device=args.device), installed_packages(), asked_node(args)
    here = arch.device == "cuda" and device_count() > 0
    if here:
        check_gpus(args, device_count())
    gpus = range(node.first_gpu, node.first_gpu + len(node.ranks) * args.dp_size)
    free = min(free_memory_bytes(gpu, arch.unified_memory) for gpu in gpus) if here else None
    measured = measured_choices(args, None, here)
    explanation = explain(args, arch, packages, free, measured=measured)
    explanation.model.require_served()
    if explanation.problem is not None:
        raise UserError(explanation.problem)
    print(to_text(explanation))
    if arch.device == "cpu":
        model = ModelConfig.from_server_args(replace(args, load_format="dummy"))
        dtype = "float32" if args.dtype == "auto" else model.dtype
        plan = make_plan(args, replace(model, dtype=dtype), arch, free_memory_bytes(None), packages)
        print(f"\n{plan.memory.log_line()}")
    _read_tokenizer(args, explanation.model.architecture)
    print("\nA server with these flags would start.")


def _read_tokenizer(args: ServerArgs, architecture: str) -> None:
    template = None if args.chat_template is None else read_template_file(args.chat_template)
    TokenizerTrial(args).check()
    tokenizer = load_tokenizer(args)
    if tokenizer is not None:
        with closing(TemplatePool(model_template(args, tokenizer, architecture, template))) as templates:
            templates.wait_ready()
