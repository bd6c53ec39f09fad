"""Experts on CPUs: products of every form against fp32, what is asked of them, and what they answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.activation import GELU, GPT_OSS_SWIGLU, RELU2, SILU, Activation
from sglang.srt.errors import UserError
from sglang.srt.hardware.cpu_cores import ANY_CPU, ThreadPlaces, cores
from sglang.srt.layers.moe.cpu_experts import library, measured, ops
from sglang.srt.layers.moe.cpu_experts.layer import LayerOnCpus
from sglang.srt.layers.moe.cpu_experts.ops import DONE, FETCHED, MAX_PAIRS, MAX_TOKENS, TOKENS, TOP_K, WHOLE, Request
from sglang.srt.layers.moe.cpu_experts.pool import CpuExpertPool
from sglang.srt.layers.moe.cpu_experts.shared import CpuExperts
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.moe.slot_ops import SlotTables
from sglang.srt.mem_cache.node_memory import first_row
from srt.layers.moe.moe_harness import NATIVE, Case, make_case

ONE, TWO = ThreadPlaces((ANY_CPU,)), ThreadPlaces((ANY_CPU,) * 2)
BOUND = 4e-3
"""Root mean square of the error by that of the results; bfloat16 between the products is 1.6e-3 of it."""
FORMS = {
    "bf16": (None, (), False),
    "fp8_block": ("fp8_block", (), False),
    "fp8_channel": ("fp8_channel", (), False),
    "fp8_tensor": ("fp8_tensor", (), False),
    "mxfp4 planes": ("mxfp4", (), False),
    "mxfp4 packed": ("mxfp4_mxfp8", NATIVE, False),
    "nvfp4 planes": ("nvfp4", (), False),
    "nvfp4 packed": ("nvfp4", NATIVE, False),
    **{f"int4 {group}": (f"int4_g{group}", (), False) for group in (32, 64, 128)},
    **{f"int4 {group} zeros": (f"int4_g{group}", (), True) for group in (32, 64, 128)},
}


def activated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
        if activation.limits_result:
            return up * (gate * torch.sigmoid(gate)).clamp(max=activation.limit)
        gate = gate.clamp(max=activation.limit)
    if activation == GELU:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return (up + activation.up_offset) * gate * torch.sigmoid(activation.alpha * gate)


def in_fp32(case: Case, ids: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What the weights give without any rounding."""

    def product(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
        out = x @ weights.dequantized(expert).T
        return out if weights.bias is None else out + weights.bias[expert].float()

    out = torch.zeros(case.x.shape)
    for expert in range(case.w13.num_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            first = product(case.x[token].float(), case.w13, expert)
            inter = first.relu() ** 2 if not activation.gated else activated(*first.chunk(2, -1), activation)
            y = product(inter, case.w2, expert)
            out.index_add_(0, token, y * case.weights[token, choice, None])
    return out


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("avx2", [False, True], ids=["newest", "avx2"])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_every_form(form: str, avx2: bool) -> None:
    """Sizes with parts of strips, of units and of passes; one, few and many tokens; biases; padding."""
    scheme, features, zeros = FORMS[form]
    for hidden, inter, tokens, bias in ((128, 64, 1, False), (384, 160, 13, True)):
        case = make_case(
            scheme, tokens, 8, 3, hidden=hidden, inter=inter, features=features, bias=bias, zero_points=zeros
        )
        activation = GPT_OSS_SWIGLU if bias else SILU
        ids = case.ids.clone()
        if tokens > 1:
            ids[0] = -1
            ids[1, 1:] = -1
        pool = CpuExpertPool(TWO, MAX_TOKENS, MAX_PAIRS, avx2)
        got = pool.run(pool.add_layer(case.w13, case.w2, activation), case.x, case.weights, ids)
        error = error_of(got, in_fp32(case, ids, activation))
        assert error < BOUND, f"{pool.kernels}: {error:.1e}"
        if tokens > 1:
            assert not got[0].any(), "no expert, no result"
    assert avx2 == (pool.kernels == "avx2") or not avx2


LIMITED = Activation(limit=0.05, limits_result=True)


@pytest.mark.parametrize("activation", [GELU, RELU2, LIMITED], ids=["gelu", "no gate", "limited result"])
def test_other_activations(activation: Activation) -> None:
    case = make_case("fp8_block", 3, hidden=256, inter=128)
    if not activation.gated:
        half = case.w13.data.shape[1] // 2
        assert case.w13.scale is not None
        case.w13 = ExpertWeights(
            case.w13.data[:, :half].contiguous(), case.w13.scheme, case.w13.scale[:, :1].contiguous()
        )
    pool = CpuExpertPool(ONE, MAX_TOKENS, MAX_PAIRS)
    got = pool.run(pool.add_layer(case.w13, case.w2, activation), case.x, case.weights, case.ids)
    assert error_of(got, in_fp32(case, case.ids, activation)) < BOUND


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    case = make_case("mxfp4", 7, 8, 3, hidden=256, inter=192)
    results = []
    for threads in (1, 2, 5):
        pool = CpuExpertPool(ThreadPlaces((ANY_CPU,) * threads), MAX_TOKENS, MAX_PAIRS)
        layer = pool.add_layer(case.w13, case.w2, SILU)
        results += [pool.run(layer, case.x, case.weights, case.ids) for _ in range(20)]
        assert pool.totals().steps == 20
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("form", ["bf16", "fp8_block", "nvfp4 planes", "mxfp4 packed"])
@pytest.mark.parametrize("node_of", [(0, 1), (0, 1, 1), (1, 1), (0, 2, 2, 1)], ids=str)
def test_rows_on_several_nodes_give_the_same_bits(form: str, node_of: tuple[int, ...]) -> None:
    """Where threads of a node have nothing left they take rows of others; a node may have no thread."""
    scheme, features, _ = FORMS[form]
    case = make_case(scheme, 7, 8, 3, hidden=384, inter=160, features=features)
    nodes = tuple(range(max(node_of) + 1))
    one, several = (
        CpuExpertPool(places, MAX_TOKENS, MAX_PAIRS)
        for places in (ONE, ThreadPlaces((-1,) * len(node_of), nodes, node_of))
    )
    results = [
        pool.run(pool.add_layer(case.w13, case.w2, SILU), case.x, case.weights, case.ids) for pool in (one, several)
    ]
    assert torch.equal(*results) and results[0].any()
    numbers = [
        (rows, count, node) for rows in (15, 160, 384, 2880) for count in (1, 2, 3, 4) for node in range(count + 1)
    ]
    assert [one.library.cpu_experts_first_row(*each) for each in numbers] == [first_row(*each) for each in numbers]


def test_other_forms_are_refused_by_name() -> None:
    pool = CpuExpertPool(ONE, MAX_TOKENS, MAX_PAIRS)
    for scheme, dtype, said in (("int8_channel", torch.bfloat16, "int8_channel"), (None, torch.float16, "float16")):
        case = make_case(scheme, 1, dtype=dtype)
        with pytest.raises(UserError, match=said):
            pool.add_layer(case.w13, case.w2, SILU)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UserError, match="no C compiler .install gcc, or set CC"):
        library.compile_library()


def test_machines_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UserError, match="for x86-64, and this machine is aarch64"):
        library.compile_library()


def test_main_memory_is_measured_on_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "ALL_BYTES", 8 << 20)
    monkeypatch.setattr(measured, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(measured, "SECONDS", 0.02)
    monkeypatch.setattr(measured, "why_no_doorbell", lambda device: "")
    rate, num_cores = measured.rate_for_experts(0)
    assert rate > 1e8 and num_cores == len(cores())
    monkeypatch.setattr(measured, "why_no_doorbell", lambda device: "it has no bell")
    assert measured.rate_for_experts(0) == (0, 0)
    monkeypatch.setattr(measured, "why_no_doorbell", lambda device: "")
    monkeypatch.setattr(measured, "ALL_BYTES", 1 << 60)
    assert measured.rate_for_experts(0) == (0, 1 * num_cores), "a system that gives no memory has no rate"


def request_of(hidden: int) -> Request:
    parts = {
        "ids": torch.zeros(MAX_PAIRS, dtype=torch.int32),
        "weights": torch.zeros(MAX_PAIRS),
        "x": torch.zeros(MAX_TOKENS * hidden, dtype=torch.bfloat16),
        "results": torch.zeros(MAX_TOKENS * hidden),
        "words": torch.zeros(ops.WORDS, dtype=torch.int32),
    }
    addresses = torch.tensor([part.data_ptr() for part in parts.values()])
    return Request(**parts, asked=torch.zeros(1, dtype=torch.int32), addresses=addresses)


# --- the doorbell -----------------------------------------------------------------------------------------------------


def connected(pool: CpuExpertPool, request: Request, deadline: float = 10.0, rate: float = 0.0) -> torch.Tensor:
    """Has the pool answer requests; returns the words with 64 bits, bell and answer at 0 and 8."""
    pool.connect(request, deadline, rate)
    return request.words.view(torch.int64)


def ring(words: torch.Tensor, number: int) -> None:
    words[DONE // 2] = 0
    words[0] = number
    while int(words[DONE // 2]) != number:
        pass


def test_requests_by_the_doorbell() -> None:
    """Of two layers by turns, some of them empty; the share follows the rates."""
    cases = [make_case(scheme, 5, 8, 3, hidden=256, inter=128) for scheme in (None, "fp8_block")]
    pool, request = CpuExpertPool(TWO, MAX_TOKENS, MAX_PAIRS), request_of(256)
    for case in cases:
        pool.add_layer(case.w13, case.w2, SILU)
    request.words[FETCHED] = 1
    words = connected(pool, request, rate=1e9)
    for step in range(12):
        case = cases[step % 2]
        ids = torch.where((case.ids + step) % 3 == 0, -1, case.ids).to(torch.int32)
        request.ids[: ids.numel()], request.weights[: ids.numel()] = ids.flatten(), case.weights.flatten()
        request.x[: case.x.numel()] = case.x.flatten()
        request.words[TOKENS], request.words[TOP_K] = (0 if step % 5 == 4 else len(ids)), ids.shape[1]
        request.results.fill_(-7.0)
        ring(words, step % 2 + 1)
        assert int(words[0]) == 0, "the bell is taken away"
        got = request.results[: case.x.numel()].view(case.x.shape)
        if step % 5 == 4:
            assert bool((request.results == -7.0).all()), "nothing was asked"
        else:
            assert error_of(got, in_fp32(case, ids, SILU)) < BOUND
    assert 0 < int(request.words[FETCHED]) < WHOLE and int(request.words[FETCHED]) != 1
    pool.close()


STUCK = """
import sys, time
sys.path[:0] = {path!r}
from srt.layers.moe import test_cpu_experts as tests
from srt.layers.moe.moe_harness import make_case
case = make_case(None, 16, 8, 8, hidden=2048, inter=1024)
pool, request = tests.CpuExpertPool(tests.ONE, 16, 128), tests.request_of(2048)
pool.add_layer(case.w13, case.w2, tests.SILU)
request.ids[:128], request.words[tests.TOKENS], request.words[tests.TOP_K] = case.ids.flatten(), 16, 8
words = tests.connected(pool, request, deadline=0.0001)
while True:
    tests.ring(words, 1)
"""


def test_cpus_that_do_not_answer_in_time_end_the_process() -> None:
    script = STUCK.format(path=[str(Path(__file__).parents[3])])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 70 and "has waited for CPUs longer than 0.0001 s" in done.stderr, done.stderr


FEW_THREADS = """
import resource, sys
from pathlib import Path
sys.path[:0] = {path!r}
from srt.layers.moe import test_cpu_experts as tests
tests.CpuExpertPool(tests.ONE, 16, 128).close()
room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    tests.CpuExpertPool(tests.ThreadPlaces((-1,) * 200), 16, 128)
except tests.UserError as error:
    print(error)
"""


def test_threads_that_the_system_does_not_start() -> None:
    """No step waits for them. Stacks of 200 threads are more than the process may have."""
    script = FEW_THREADS.format(path=[str(Path(__file__).parents[3])])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert "--kt-cpuinfer: the system starts no 200 threads for a rank; use fewer" in done.stdout, done.stderr


# --- a layer ----------------------------------------------------------------------------------------------------------


def layer_of(case: Case, num_slots: int, threads: int, shared: CpuExperts) -> LayerOnCpus:
    tables = SlotTables.filled(case.w13.num_experts, num_slots, torch.device("cpu"))
    slots = SimpleNamespace(bank=(case.w13, case.w2), tables=tables)
    return LayerOnCpus(SimpleNamespace(entry=lambda op: op.reference), slots, SILU, threads, shared)


def test_a_layer_divides_its_missing_experts_and_the_parts_make_the_whole() -> None:
    case, shared = make_case("fp8_block", 6, 8, 3, hidden=256, inter=128), CpuExperts()
    layer = layer_of(case, 3, 2, shared)
    want, counts = in_fp32(case, case.ids, SILU), set()
    missing = {*case.ids.flatten().tolist()} - {5, 6, 7}
    for step in range(40):
        layer.tables.clock.fill_(step)
        others = layer.begin(case.x, case.weights, case.ids)
        assert others is not None
        of_cpus = {*case.ids[others < 0].tolist()}
        assert of_cpus <= missing, "what is in slots is the GPU's"
        assert torch.equal(others[others >= 0], case.ids[others >= 0])
        counts.add(len(of_cpus))
        out = in_fp32(case, others, SILU)
        layer.end(out)
        assert error_of(out, want) < BOUND
    share = 1 - sum(counts) / len(counts) / len(missing)
    assert len(counts) > 1 and abs(share - 0.25) < 0.2, "a quarter is the GPU's at first"


def test_steps_with_many_tokens_are_the_gpus() -> None:
    case = make_case(None, MAX_TOKENS + 1, 8, 2)
    layer = layer_of(case, 3, 1, CpuExperts())
    assert layer.begin(case.x, case.weights, case.ids) is None
    assert layer.begin(case.x[:0], case.weights[:0], case.ids[:0]) is None
    assert layer.begin(case.x[:MAX_TOKENS], case.weights[:MAX_TOKENS], case.ids[:MAX_TOKENS]) is not None
