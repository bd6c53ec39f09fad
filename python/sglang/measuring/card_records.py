"""The times of products of `sglang.bench.card` as records: of what the tables choose, in one round each. No torch.

One round decides nothing, but tells the cost model how long its predictions are off.
"""

from __future__ import annotations

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.measured.questions import name_of_config, product_question
from sglang.srt.kernels.measured.records import Record
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import Choice, Need, NoKernel
from sglang.srt.kernels.tile_configs import Shape, config_for
from sglang.tuning.ops import Experts, Linear, Op


def card_record(op: Op, arch: ArchTraits, seconds: float, predicted: float | None) -> Record | None:
    """Returns the record of an op's time; None for an op that has no question."""
    if isinstance(op, Linear) and op.scheme is not None:
        shape = (op.rows, op.cols, False)
        return _of_product(Need("linear", quant=op.scheme, shapes=(shape,)), shape, op, arch, seconds, predicted)
    if isinstance(op, Experts):
        shapes = ((2 * op.intermediate, op.hidden, op.bias), (op.hidden, op.intermediate, op.bias))
        need = Need("fused_moe", quant=op.scheme, shapes=shapes, experts=(op.num_experts, op.top_k, 1))
        return _of_product(need, None, op, arch, seconds, predicted)
    return None


def _of_product(
    need: Need,
    shape: Shape | None,
    op: Linear | Experts,
    arch: ArchTraits,
    seconds: float,
    predicted: float | None,
) -> Record | None:
    try:
        choice: Choice = resolve(need, arch, Ledger.load(), frozenset({"triton"}))
    except NoKernel:
        return None
    config = config_for(choice.make_tile_configs(arch).by_shape[shape], op.tokens)
    question = product_question(need, shape, op.tokens)
    return Record(question, name_of_config(config), (seconds,), predicted)
