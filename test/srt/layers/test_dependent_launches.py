"""What kernels that begin early read before they wait for the one ahead: what it cannot be writing, and no more. No
GPU; on one, that a graph of such launches computes what plain ones do.

Compiling takes long: `make thorough` has the variants that read what others do, and most of those whose registers are
compared with a plain launch's."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import interpreter
import pytest
import torch
from pairs import some_of

import sglang
from sglang.ledger.compile import Compiled, compile_for
from sglang.ledger.measure import variant_of
from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.configs.activation import SILU
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.attention.triton_ops import decode_attention
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.triton_ops import gemv, linear_tiles, pdl
from srt.layers.attention.reference import Problem
from srt.layers.attention.test_attention_kernels import first_tile
from srt.layers.moe.moe_harness import Case, make_case, tile_configs_of

LOCK, TARGET = "sm120", "sm_120"
PLAN = {"work_ptr", "req_pool_indices_ptr"}
DRAFT_TOKENS = PLAN | {"prefix_lens_ptr"}
BEFORE_THE_WAIT = {
    ("decode_attention", "64x64/bfloat16/bfloat16/plain"): DRAFT_TOKENS | {"seq_lens_ptr"},
    ("decode_attention", "64x64/bfloat16/bfloat16/window_cap_sinks"): DRAFT_TOKENS | {"seq_lens_ptr"},
    ("decode_attention", "576x512/bfloat16/bfloat16/plain"): DRAFT_TOKENS,
    ("decode_attention", "combine/16"): {"pieces_ptr"},
    ("topk_softmax", "128k8/bf16"): {"num_valid"},
    ("topk_sigmoid", "256k8g8/fp32"): {"num_valid", "bias"},
    ("topk_hash", "k6/fp32"): {"num_valid", "token_ids", "table", "expert_map"},
    ("linear", "few/fp8_block"): {"w", "w_scale", "bias"},
    ("linear", "few/fp8_channel"): {"w", "w_scale", "bias"},
    ("linear", "few/mxfp8"): {"w", "w_scale", "bias"},
    ("linear", "skinny/64x128"): {"w", "bias"},
    ("linear", "skinny_logits/32x256"): {"w", "bias"},
    ("fused_moe", "gate_up_pairs/fp8_block"): set(),
    ("fused_moe", "down_sum/fp8_block"): {"topk_ids", "w2", "w_scale"},
    ("fused_moe", "down_sum/bf16"): {"topk_ids", "w2"},
}
"""(op, key of a variant) -> the tensors that it reads before it waits."""
PREFETCHED = [key for key in BEFORE_THE_WAIT if "skinny" in key[1]]
WEIGHTS_AHEAD = [k for k, tensors in BEFORE_THE_WAIT.items() if {"w", "w2"} & tensors and k not in PREFETCHED]
ALIKE = {("decode_attention", "64x64/bfloat16/bfloat16/window_cap_sinks"), ("linear", "few/mxfp8")}
"""Variants of which another one reads the same."""
FEW_REGISTERS = {("linear", "few/fp8_channel"), ("linear", "skinny/64x128"), ("fused_moe", "down_sum/bf16")}
"""The cheapest to compile of each kernel."""
MARGIN = 72
"""Registers that a thread of a dependent launch may take beyond those on record, which are of plain launches."""
_REGISTER = re.compile(r"%\w+")
_PARAMETER = re.compile(r"_param_(\d+)")


@functools.cache
def early(op: str, key: str) -> Compiled:
    variant = variant_of(LOCK, op, key)
    return compile_for(replace(variant, constexprs={**variant.constexprs, "PDL": True}), TARGET)


def before_the_wait(op: str, key: str) -> str:
    return early(op, key).ptx.partition("griddepcontrol.wait")[0]


def read_from(ptx: str, names: list[str]) -> set[str]:
    """Of the parameters `names`, in order: those whose values make the addresses that PTX without branches loads from.
    What is loaded makes no address of the tensor that it came from."""
    origins: dict[str, set[str]] = {}
    read: set[str] = set()
    for line in ptx.splitlines():
        operation = re.sub(r"^\s*@!?%\w+\s+", "", line).strip()
        registers = _REGISTER.findall(operation)
        if operation.startswith("ld.param"):
            number = int(_PARAMETER.findall(operation)[-1])
            origins[registers[0]] = {names[number]} if number < len(names) else set()
        elif operation.startswith(("ld.global", "prefetch.global")):
            loaded, _, address = operation.partition("[")
            read |= set().union(*(origins.get(register, set()) for register in _REGISTER.findall(address)))
            origins |= {register: set() for register in _REGISTER.findall(loaded)}
        elif registers:
            origins[registers[0]] = set().union(*(origins.get(register, set()) for register in registers[1:]))
    return read


@pytest.mark.parametrize(("op", "key"), some_of(BEFORE_THE_WAIT, [key for key in BEFORE_THE_WAIT if key not in ALIKE]))
def test_what_is_read_before_the_wait(op: str, key: str) -> None:
    variant = variant_of(LOCK, op, key)
    before, wait, rest = early(op, key).ptx.partition("griddepcontrol.wait")
    names = [name for name, kind in variant.signature.items() if kind != "constexpr" and name not in variant.ones]
    pointers = {name for name in names if variant.signature[name].startswith("*")}
    assert wait and not re.search(r"\b(st|cp|red|atom)\.|\bbra\b|\bret\b", before), (
        "all programs wait, and write nothing"
    )
    assert read_from(before, names) & pointers == BEFORE_THE_WAIT[op, key]
    assert "griddepcontrol.launch_dependents" in rest and "griddepcontrol.launch_dependents" not in before


@pytest.mark.parametrize(("op", "key"), some_of(WEIGHTS_AHEAD, [key for key in WEIGHTS_AHEAD if key not in ALIKE]))
def test_weights_are_on_their_way_before_the_wait(op: str, key: str) -> None:
    """Those of every step that is loaded early, and they are not used before it: that would wait for them."""
    before = before_the_wait(op, key)
    assert (
        before.count("L1::evict_first") >= variant_of(LOCK, op, key).constexprs["EARLY"] >= 8 and "e4m3x2" not in before
    )


@pytest.mark.parametrize(("op", "key"), PREFETCHED)
def test_lines_of_weights_are_asked_for_before_the_wait(op: str, key: str) -> None:
    """Each once, by one thread, and without a place to put it."""
    plain = variant_of(LOCK, op, key)
    lines = plain.constexprs["BLOCK_N"] * plain.constexprs["AHEAD"] * 2 // 128
    asked = before_the_wait(op, key).count("prefetch.global.L2 [")
    assert asked * 32 * plain.tile["num_warps"] == lines > 0


@pytest.mark.parametrize(("op", "key"), some_of([*WEIGHTS_AHEAD, *PREFETCHED], FEW_REGISTERS))
def test_what_travels_early_takes_few_registers(op: str, key: str) -> None:
    _, registers, spills, stack, _ = compile_for(variant_of(LOCK, op, key), TARGET).measurement
    measured = early(op, key).measurement
    assert measured[1] <= registers + MARGIN and measured[2:4] == (spills, stack) == (0, 0)


def _early_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(Path(sglang.__file__).parent.rglob("*.py")):
        source = path.read_text()
        if "gdc_wait" in source:
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef) and "gdc_" in ast.unparse(node):
                    yield f"{path.name}: {node.name}", node


def test_every_early_kernel_waits_before_it_lets_the_next_one_begin() -> None:
    """Only then have all but the kernel directly ahead ended where a kernel begins."""
    kernels = dict(_early_kernels())
    assert len(kernels) > 20
    for name, kernel in kernels.items():
        calls = [n for n in ast.walk(kernel) if isinstance(n, ast.Call) and "gdc_" in ast.unparse(n.func)]
        lines = {ast.unparse(call.func).rpartition(".")[2]: call.lineno for call in calls}
        assert lines["gdc_wait"] < lines.get("gdc_launch_dependents", kernel.end_lineno), name
        returns = [n.lineno for n in ast.walk(kernel) if isinstance(n, ast.Return)]
        assert all(lines["gdc_wait"] < line for line in returns), name


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_of_early_launches_keeps_the_order() -> None:
    """Queries and the newest key and value come from the kernel directly ahead; the router reads what is merged."""
    p = Problem([5000, 33, 1023], [1] * 3, 8, 2, 64, 64, device="cuda")
    tile = first_tile("decode_attention", 64, 64, torch.bfloat16)
    workspace = decode_attention.DecodeWorkspace.allocate(3, 8, 2, 64, 132, tile, p.device)
    lens, out = p.prefix + 1, torch.empty_like(p.q)
    w, router = torch.randn(512, 512, device="cuda").bfloat16() / 16, torch.randn(64, 512, device="cuda").bfloat16()

    def step() -> list[torch.Tensor]:
        plan = decode_attention.plan_decode(lens, workspace, tile)
        x, results = p.q[0].flatten().clone(), []
        for _ in range(20):
            x = gemv.gemv(x, w)
            q = x.view(1, 8, 64).expand(3, 8, 64)
            decode_attention.decode_attention_fwd(
                q, out, p.k_cache, p.v_cache, p.req_to_token, p.req_pool_indices, lens, plan, scale=1.0, tile=tile
            )
            x = gemv.gemv(out[0].flatten(), w)
            results += [x, *topk.topk_softmax(gemv.gemv(x, router)[None], 8, True)]
        return results

    expected = step()
    pdl.enable(True)
    try:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for _ in range(50):
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    finally:
        pdl.enable(False)


def _experts_of_every_row(case: Case, router: torch.Tensor) -> list[torch.Tensor]:
    """Row after row through a router, the choice of experts and both their products."""
    rows = (case.x[i : i + 1] for i in range(len(case.x)))
    choices = ((row, topk.topk_softmax(gemv.gemv(row, router), 8, True)) for row in rows)
    configs = tile_configs_of(case.w13, case.w2, case.ids)
    return [fused_moe(row, case.w13, case.w2, weights, ids, SILU, configs) for row, (weights, ids) in choices]


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_experts_in_a_graph_read_the_choices_of_their_own_row() -> None:
    """Which are written two launches ahead, where those of the row before were."""
    case = make_case("fp8_block", 32, 64, 8, 2048, 384, device="cuda")
    router = torch.randn(64, 2048, device="cuda").bfloat16() / 16
    expected = _experts_of_every_row(case, router)
    pdl.enable(True)
    try:
        _experts_of_every_row(case, router)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = _experts_of_every_row(case, router)
        for _ in range(50):
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    finally:
        pdl.enable(False)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block", "int8_channel"])
@pytest.mark.parametrize("cols", [512, 1536, 5120, 7168, 8192])
def test_one_row_asks_for_whole_rows_of_weights_before_it_waits(scheme: str, cols: int) -> None:
    """So that they travel while a sum over the ranks waits for its peers."""
    (few, *_) = linear_tiles.tile_configs_of(SCHEMES[scheme], (2048, cols, False), arch_by_name("rtx-pro-6000-server"))
    (tile,) = few.candidates[0]
    assert few.variant == linear_tiles.FEW and tile["EARLY"] * tile["COLS"] >= cols
