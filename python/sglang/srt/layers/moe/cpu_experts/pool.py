"""The threads that compute experts on CPUs, and how weights are described to them."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch

from sglang.srt.configs.activation import Activation, gate_constants
from sglang.srt.errors import UserError
from sglang.srt.hardware.cpu_cores import ThreadPlaces
from sglang.srt.layers.moe.cpu_experts.library import Activated, Mailbox, Matrix, load_library
from sglang.srt.layers.moe.cpu_experts.ops import Request
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.plan.cpu_experts import FLAG, why_not_on_cpus

BF16, E4M3, E2M1_PACKED, E2M1_PLANES, E2M1_PAIRS, INT4_PLANES, INT4_ZEROS = range(7)
"""`enum element` of experts.h."""
NO_SCALE, F32, E8M0, SCALE_E4M3, SCALE_BF16, WORDS = range(6)
"""`enum scale`."""
SCALES = {"float32": F32, "e8m0": E8M0, "e4m3": SCALE_E4M3, "bfloat16": SCALE_BF16}


def _element(weights: ExpertWeights) -> int:
    scheme = weights.scheme
    if scheme is None:
        return BF16
    if scheme.bits == 8:
        return E4M3
    if scheme.element == "int4":
        return INT4_ZEROS if weights.zero_points else INT4_PLANES
    if weights.plane_cols is None:
        return E2M1_PACKED
    return E2M1_PAIRS if scheme.group == (1, 32) else E2M1_PLANES


def matrix_of(weights: ExpertWeights) -> Matrix:
    """Describes weights in main memory, which must outlive what is returned. Raises UserError for forms without a
    kernel."""
    scheme, data, scale = weights.scheme, weights.data, weights.scale
    if problem := why_not_on_cpus(scheme, str(torch.bfloat16 if scheme else data.dtype).removeprefix("torch.")):
        raise UserError(problem)
    if weights.bias is not None and weights.bias.dtype != torch.bfloat16:
        raise UserError("CPUs compute experts with biases in bfloat16 only")
    matrix = Matrix(
        data=data.data_ptr(), data_row=data.stride(1) * data.element_size(),
        data_expert=data.stride(0) * data.element_size(), rows=weights.rows, cols=weights.cols,
        element=_element(weights), scale_type=NO_SCALE,
        factor=None if weights.global_scale is None else weights.global_scale.data_ptr(),
        bias=None if weights.bias is None else weights.bias.data_ptr(),
    )  # fmt: skip
    if scheme is not None and scale is not None:
        matrix.scale = scale.data_ptr()
        matrix.scale_expert = scale.stride(0) * scale.element_size()
        matrix.scale_row = scale.stride(1) * scale.element_size() if scale.ndim > 1 else 0
        matrix.scale_type = WORDS if weights.zero_points else SCALES[scheme.scale]
        matrix.group, matrix.rows_of_scale = scheme.group[1], scheme.group[0]
    return matrix


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """What CPUs have done: requests, experts, bytes of weights, and nanoseconds of work."""

    steps: int
    experts: int
    num_bytes: int
    nanoseconds: int


class CpuExpertPool:
    """Threads that compute experts, the caller's among them. `places`: where each thread runs, and the nodes that have
    rows of every matrix; requests have up to `max_tokens` tokens and `max_pairs` (token, expert) pairs. `avx2`: leaves
    newer instructions out. Raises UserError."""

    def __init__(self, places: ThreadPlaces, max_tokens: int, max_pairs: int, avx2: bool = False) -> None:
        self.library = library = load_library()
        name = library.cpu_experts_kernels(int(avx2))
        if name is None:
            raise UserError("CPUs cannot compute experts: this CPU has no AVX2")
        self.kernels, self.max_tokens, self.max_pairs = name.decode(), max_tokens, max_pairs
        self.hidden_sizes: list[int] = []
        threads, nodes = len(places.cpus), max(1, len(places.nodes))
        cpus, node_of = ((ctypes.c_int * threads)(*numbers) for numbers in (places.cpus, places.node_of))
        self._pool = library.cpu_experts_create(threads, cpus, nodes, node_of, max_tokens, max_pairs, int(avx2))
        if not self._pool:
            raise UserError(
                f"{FLAG}: the system starts no {threads} threads for a rank; use fewer, or raise the limit of"
                " processes (ulimit -u, docker run --pids-limit)"
            )
        self._weights: list[ExpertWeights] = []
        self.close = weakref.finalize(self, library.cpu_experts_destroy, self._pool)

    def add_layer(self, w13: ExpertWeights, w2: ExpertWeights, activation: Activation) -> int:
        """Adds a layer, and returns its number. Raises UserError for a form without a kernel."""
        constants = gate_constants(activation)
        activated = Activated(
            constants["ALPHA"], constants["CUBIC"], constants["OFFSET"], constants["LIMIT"], int(constants["HAS_GATE"])
        )
        number: int = self.library.cpu_experts_add_layer(self._pool, matrix_of(w13), matrix_of(w2), activated)
        if number < 0:
            raise UserError("CPUs cannot compute so many layers of experts, or such wide ones")
        self._weights += (w13, w2)  # their addresses are in use
        self.hidden_sizes.append(w2.rows)
        return number

    def run(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum [T, H] fp32 of the experts that ids [T, k] int32 (-1: none) name, with `weights`
        [T, k] fp32, of x [T, H] bfloat16. All in main memory and contiguous."""
        out = torch.empty(x.shape[0], self.hidden_sizes[layer], dtype=torch.float32)
        code = self.library.cpu_experts_run(
            self._pool, layer, *ids.shape, ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr()
        )
        assert not code, "a request with too many tokens"
        return out

    def connect(self, request: Request, deadline: float, bus_rate: float) -> None:
        """Answers requests that come by the doorbell from now on. `bus_rate`: bytes a second at which the GPU copies
        experts; 0: its share stays. A request that takes longer than `deadline` seconds ends the process. Raises
        UserError."""
        parts = (request.words, request.ids, request.weights, request.x, request.results)
        mailbox = Mailbox(*(ctypes.c_void_p(part.data_ptr()) for part in parts))
        self._request = request  # threads read it
        if self.library.cpu_experts_connect(self._pool, mailbox, deadline, bus_rate):
            raise UserError(f"{FLAG}: the system starts no more threads; raise the limit of processes (ulimit -u)")

    def totals(self) -> PoolTotals:
        """Returns what has been done. Of a pool with a doorbell bytes and time are those of the last seconds."""
        numbers = (ctypes.c_uint64 * 4)()
        self.library.cpu_experts_totals(self._pool, numbers)
        return PoolTotals(*numbers)
