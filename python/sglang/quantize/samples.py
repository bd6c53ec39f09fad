"""A model that computes sample prompts, for what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from sglang.bench.direct import DirectBatch, direct_table
from sglang.quantize.prompts import read_prompts
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs

BATCH_PROMPTS = 16
STEP_TOKENS = 2048
WARM_UP_TOKENS = 64
"""A context that a runner on a GPU can compile its kernels in."""
PlanOf = Callable[[ServerArgs, ModelConfig], Plan]


@dataclass(frozen=True, slots=True)
class Samples:
    """A runner, and the token ids of the prompts in the batches that it computes."""

    runner: ModelRunner
    batches: list[list[list[int]]]

    @classmethod
    def load(cls, model_path: str, prompts: str, max_tokens: int, device: str, plan_of: PlanOf) -> Samples:
        """Loads the model with the plan that `plan_of` makes for the first `max_tokens` tokens of the file `prompts`,
        on `device` (auto, cuda or cpu). Raises UserError if the file has no prompts or an unreadable one, or the model
        cannot be run."""
        args, model, batches = prepared(model_path, prompts, max_tokens, device)
        return cls(ModelRunner(plan_of(args, model)), batches)

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.batches))

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for batch in self.batches for ids in batch)

    def compute(self) -> None:
        """Computes all prompts."""
        kv = direct_table(self.runner)
        for batch in tqdm(self.batches, desc="Calibrating", unit="batch"):
            requests = DirectBatch(self.runner, kv, batch, 1)
            requests.prefill(STEP_TOKENS)
            requests.close()


def prepared(
    model_path: str, prompts: str, max_tokens: int, device: str
) -> tuple[ServerArgs, ModelConfig, list[list[list[int]]]]:
    """Returns the arguments of a runner for the first `max_tokens` tokens of the file `prompts`, its model, and their
    ids in batches. Reads no weights. Raises UserError for a wrong file or model."""
    args = ServerArgs(model_path=model_path, device=device, random_seed=0, disable_cuda_graph=True)
    model = ModelConfig.from_server_args(args)
    longest = model.context_len - 1
    token_ids = read_prompts(prompts, args, model.architecture, max_tokens, longest)
    batches = [token_ids[i : i + BATCH_PROMPTS] for i in range(0, len(token_ids), BATCH_PROMPTS)]
    args = replace(
        args,
        context_length=min(longest, max(WARM_UP_TOKENS, *map(len, token_ids))) + 1,
        chunked_prefill_size=STEP_TOKENS,
        max_running_requests=BATCH_PROMPTS,
        # One more for the next token; twice, because windows get a part of the cache only.
        max_total_tokens=2 * max(sum(len(ids) + 1 for ids in batch) for batch in batches),
    )
    return args, model, batches


def checked_plan(args: ServerArgs, problem: str) -> Plan:
    """Returns the plan. Raises UserError that begins with `problem`."""
    try:
        return create_plan(args)
    except UserError as error:
        raise UserError(f"{problem}: {error} (options named there are the server's)") from error


def values_of(plan: Plan) -> dict[str, Any]:
    """Returns the plan's fields, to make a plan of another class of them."""
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
