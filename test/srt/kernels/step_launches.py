"""Every launch of a decode step, counted without a GPU: the model is built of tensors without memory, Triton's launches
are noted and not made, and of torch's operations those that compute something.

    python test/srt/kernels/step_launches.py          # tables of benchmark/results/serving.md

A launch begins when all before it have ended, or (programmatic launches) early: then it waits itself, and has loaded
first what the one ahead does not write, if its source says so.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from sglang.ledger.launch_form import kernel_name, recording
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.all_reduce_table import NORMED_ROW_BYTES, NORMED_ROWS
from sglang.srt.layers.attention.sites import create_attention_sites
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.model_executor.device_state import DeviceState, StepShape
from sglang.srt.model_executor.input_ops import InputOps
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.cache_spec import Window
from sglang.srt.plan.caches import cache_groups, row_tables
from sglang.srt.plan.model_planner import parallel_config_of
from sglang.srt.plan.plan import make_plan
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import config_files

CONTEXT = 8192
BLOCKS_OF_128 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@dataclass(frozen=True, slots=True)
class Model:
    """A config of `published.config_files`; `layers`: how many of its first ones are built; the last one counts."""

    config: str
    layers: int
    quantization: Mapping[str, Any] | None = None


MODELS = {
    "Qwen3-30B-A3B FP8": Model("Qwen3-30B-A3B", 2, BLOCKS_OF_128),
    "GLM-4.7-FP8": Model("glm47", 5),
    "GPT-OSS-20B": Model("gpt-oss-20b", 2),
    "DeepSeek-V3": Model("deepseek_v3", 5),
    "DeepSeek-V4-Flash, window": Model("deepseek_v4", 2),
    "DeepSeek-V4-Flash, rate 4": Model("deepseek_v4", 3),
    "DeepSeek-V4-Flash, rate 128": Model("deepseek_v4", 4),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """`early`: it starts before those ahead of it have ended. `loads_first`: and loads something before it waits."""

    name: str
    early: bool = False
    loads_first: bool = False

    def __str__(self) -> str:
        return self.name + ("" if not self.early else "^" if self.loads_first else "'")


class Recorder(TorchDispatchMode):
    """Notes what is launched while `part` says where it belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, list[Launch]] = {}
        self.part = ""

    def note(self, launch: Launch) -> None:
        self.parts.setdefault(self.part, []).append(launch)

    def of_triton(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        names = kernel.arg_names
        constants = {names[path[0]]: value for path, value in compile["constants"].items()}
        early = constants.get("PDL") is True
        before_the_wait = inspect.getsource(kernel.fn).partition("gdc_wait")[0]
        some = constants.get("EARLY", 1) > 0
        loads = ("tl.load(", "load_weights(", "_matrix_part(", "prefetch(")
        loads_first = early and some and any(load in before_the_wait for load in loads)
        self.note(Launch(kernel_name(kernel).partition(".")[2], early, loads_first))
        return True  # nothing is compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        # What may be a view (`to`, `reshape`) is none where it has a storage of its own.
        view = (func.is_view or name == "_unsafe_view") and self._storages(args) & self._storages((out,))
        if not view and "empty" not in name:
            self.note(Launch(f"torch.{name}"))
        return out

    @staticmethod
    def _storages(values: Any) -> set[int]:
        return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, torch.Tensor)}


class PeerSums:
    """sgl-kernel's all-reduce, as the table has it for few rows over NVLink and PCIe."""

    def __init__(self, recorder: Recorder, early: bool) -> None:
        self.recorder, self.early = recorder, early

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        return True

    def can_norm(self, x: torch.Tensor) -> bool:
        return len(x) <= NORMED_ROWS and x.shape[1] * x.element_size() <= NORMED_ROW_BYTES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.recorder.note(Launch("all_reduce", self.early))
        return x

    def all_reduce_add_rms_norm(self, x: torch.Tensor, residual: Any, weight: Any, eps: float) -> Any:
        self.recorder.note(Launch("all_reduce_add_rms_norm", self.early))
        return x, x if residual is None else residual


class _Part:
    """A layer that says when it runs."""

    def __init__(self, recorder: Recorder, layer: Any, name: str) -> None:
        self.recorder, self.layer, self.name = recorder, layer, name

    def by_block(self, *args: Any) -> Iterator[None]:
        before, self.recorder.part = self.recorder.part, self.name
        yield from self.layer.by_block(*args)
        self.recorder.part = before if self.name != "layer" else "after"


def launches(name: str, tp_size: int, batch: int, card: str = "rtx-pro-6000-server") -> dict[str, list[Launch]]:
    """Of a decode step of `batch` requests on one of `tp_size` ranks: "before" the layers, of the last "layer" that is
    built (the kind that most are) and "after" them, without sampling and without the copy that a graph's logits are."""
    spec = MODELS[name]
    config = json.loads(config_files()[spec.config].read_text())
    config["num_hidden_layers"] = spec.layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: spec.layers]
    if "num_hash_layers" in config:
        # Tables of experts by token are looked at when they are loaded, and packing 256 experts takes long.
        config |= {"num_hash_layers": 0, "n_routed_experts": 16}
    if spec.quantization is not None:
        config["quantization_config"] = spec.quantization
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        args = ServerArgs.from_kwargs(model_path=folder, load_format="dummy", tp_size=tp_size, context_length=CONTEXT)
        arch = arch_by_name(card)
        plan = make_plan(args, ModelConfig.from_server_args(args), arch, 90 << 30, frozenset({"triton"}))
    groups, recorder = groups_of(plan.ranks, 0), Recorder()
    if tp_size > 1:
        groups.tp.reduce_with(PeerSums(recorder, "pdl" in arch.features))
    parallel = parallel_config_of(args, plan.model.dtype, plan.description)
    caches = cache_groups(plan.description, parallel)
    tables = row_tables(caches)
    windows = tuple(WindowSize(table.tokens, 65_535) for table in tables if isinstance(table, Window))
    capability = arch.capability or (12, 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(patch.object(parallel_state, "groups", lambda: groups))
        stack.enter_context(patch.object(groups.tp, "all_gather", lambda x, dim=-1: x))
        stack.enter_context(_dependent_launches("pdl" in arch.features))
        stack.enter_context(recording(f"sm_{capability[0]}{capability[1]}"))
        model = CausalLM(plan, device="meta")
        for step in model.finish:
            step()
        attention = create_attention_sites(plan, "meta")
        model.layers = [
            _Part(recorder, layer, "layer" if i == spec.layers - 1 else "others")  # type: ignore[misc]
            for i, layer in enumerate(model.layers)
        ]
        sizes = PoolSizes(65_535, 1, 64, CONTEXT, windows)
        CachePools(caches, sizes, "meta").bind(model.caches)
        state = DeviceState(model, attention, len(tables), sizes, "meta", ops=InputOps(plan))
        slots, lens = (torch.empty(batch, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32))
        valid = torch.empty(1, dtype=torch.int32, device="meta")
        import triton

        stack.enter_context(patch.object(triton.knobs.runtime, "jit_cache_hook", recorder.of_triton))
        stack.enter_context(recorder)
        recorder.part = "before"
        arrays = {"decode_slots": slots, "decode_lens": lens, "decode_loc": torch.empty_like(slots)}
        step_batch = state.batch(arrays, StepShape(batch, batch), num_valid_tokens=valid)  # type: ignore[arg-type]
        model.logits(model(step_batch))
    return {part: recorder.parts.get(part, []) for part in ("before", "layer", "after")}


@contextlib.contextmanager
def _dependent_launches(on: bool) -> Iterator[None]:
    before = pdl.options()
    pdl.enable(on)
    try:
        yield
    finally:
        pdl.enable("launch_pdl" in before)


SHOWN = (
    *(("Qwen3-30B-A3B FP8", tp_size, batch) for tp_size in (1, 2) for batch in (1, 16)),
    *(("GLM-4.7-FP8", tp_size, batch) for tp_size in (2, 8) for batch in (1, 16)),
    *(("GPT-OSS-20B", 1, batch) for batch in (1, 16)),
    *(("DeepSeek-V3", 8, batch) for batch in (1, 16)),
    *((name, 4, batch) for name in MODELS if "V4" in name for batch in (1, 16)),
)


def row(name: str, tp_size: int, batch: int, parts: dict[str, list[Launch]]) -> str:
    """Of the page's table."""
    names = [str(launch).replace("_kernel", "") for launch in parts["layer"]]
    around = len(parts["before"]) + len(parts["after"])
    return f"| {name} | {tp_size} | {batch} | {len(names)} | {around} | {', '.join(names)} |"


def main() -> None:
    for name, tp_size, batch in SHOWN:
        print(row(name, tp_size, batch, launches(name, tp_size, batch)))


if __name__ == "__main__":
    main()
