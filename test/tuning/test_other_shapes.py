"""What the model of the card learned from shapes that it was wrong about, and cards that nobody timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang import explain
from sglang.cli import main
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import describe_model
from sglang.tuning.attention_model import Keys, Prompt
from sglang.tuning.best_times import best
from sglang.tuning.ops import WITHOUT_GATE, DecodeAttention, Experts, ExtendAttention, Linear, describe, parse_shape
from sglang.tuning.predicted_times import predicted
from sglang.tuning.rates import CEILINGS, RATES, ceilings_of, rates_of
from sglang.tuning.sglang_times import PREDICTED, TIMED, gated, time_by_sglang
from sglang.tuning.step import decode_step
from sglang.tuning.steps import ops_of, time_step, total

CARD = arch_by_name("rtx-pro-6000-server")
BY_DATA_SHEET = (
    "rtx-5090", "rtx-5080", "rtx-5070-ti", "rtx-5060-ti", "rtx-pro-5000", "rtx-pro-5000-72gb", "rtx-pro-4500",
    "rtx-pro-6000-max-q", "gb10",
)  # fmt: skip
PLANNED = ("rtx-5090", "rtx-5060-ti", "rtx-pro-4500", "gb10")
"""Of these, the cards of which layouts are planned here."""
CONFIGS = Path(__file__).parents[1] / "srt" / "kernels" / "configs"
PUBLISHED = CONFIGS.parent / "published"


# --- experts without a gate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [None, "fp8_channel", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 64, 8192])
def test_experts_without_a_gate_have_two_matrices(tokens: int, scheme: str | None) -> None:
    with_gate, without = (Experts(tokens, 128, 6, 2688, 1856, scheme, gate=gate) for gate in (True, False))
    assert without.weights == pytest.approx(with_gate.weights * 2 / 3)
    assert without.operations == pytest.approx(with_gate.operations * 2 / 3)
    slow, quick = predicted(with_gate, CARD), predicted(without, CARD)
    assert slow is not None and quick is not None
    assert 0.6 * slow.seconds < quick.seconds < 0.93 * slow.seconds


def test_a_shape_of_nemotrons_experts_has_no_gate() -> None:
    assert {(512, 22), (128, 6)} == WITHOUT_GATE and gated(128, 8)
    sizes = "fused_moe tokens=16 num_experts=512 top_k=22 hidden=2048 intermediate=1280"
    for text, gate in ((sizes, False), (f"{sizes} gate=1", True), (sizes.replace("22", "10"), True)):
        op = parse_shape(text)
        assert isinstance(op, Experts) and op.gate == gate and parse_shape(describe(op)) == op
    assert parse_shape(f"{sizes.replace('22', '10')} gate=0") != parse_shape(sizes.replace("22", "10"))


@pytest.mark.parametrize(
    ("shape", "microseconds"),
    [
        # TensorRT-LLM's and vLLM's times of FlashInfer's kernels, which SGLang was not timed with.
        ("tokens=256 num_experts=512 top_k=22 hidden=8192 intermediate=1280 scheme=nvfp4", 4483),
        ("tokens=16 num_experts=16 top_k=1 hidden=5120 intermediate=8192 scheme=nvfp4", 842),
    ],
)
def test_experts_of_a_framework_with_the_same_kernel_stand_in(shape: str, microseconds: float) -> None:
    known = time_by_sglang(parse_shape(f"fused_moe {shape}"), CARD)
    assert known is not None and known[1] == TIMED
    assert known[0] * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_without_a_gate_it_takes_the_time_of_two_matrices_in_16_bits_too() -> None:
    sizes = (256, 512, 22, 4096, 2688)
    without, with_gate = (time_by_sglang(Experts(*sizes, gate=gate), CARD) for gate in (False, True))
    assert without is not None and with_gate is not None
    assert 0.55 < without[0] / with_gate[0] < 0.75
    assert best(Experts(*sizes), CARD) is None, "nobody timed these experts with a gate"


def test_steps_of_nemotron_have_experts_without_gates(tmp_path: Path) -> None:
    config = json.loads((PUBLISHED / "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16" / "config.json").read_text())
    model = describe_model(config, quantization_of(config, tmp_path, None, "default"), source="nemotron")
    experts = {
        op for _, op in ops_of(model, ParallelConfig("bfloat16", "bfloat16"), decode_step(1)) if op.kind == "fused_moe"
    }
    assert experts == {Experts(1, 128, 6, 2688, 1856, gate=False)}


# --- one expert a token, and what stays in the L2 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "experts", "intermediate", "scheme", "microseconds"),
    [
        (1, 128, 256, None, 24.3), (4, 128, 256, None, 26.1), (1, 128, 2048, None, 29.2), (2, 128, 1024, None, 28.0),
        (4, 16, 1024, "fp8_block", 50.5), (8, 16, 1024, "fp8_block", 60.6), (16, 16, 512, "fp8_block", 57.3),
        (16, 16, 2048, "fp8_block", 361.5),
    ],
)  # fmt: skip
def test_one_expert_a_token_is_known_without_its_table(
    tokens: int, experts: int, intermediate: int, scheme: str | None, microseconds: float
) -> None:
    """Published times of hidden size 5,120, by the cost model alone."""
    known = time_by_sglang(Experts(tokens, experts, 1, 5120, intermediate, scheme), CARD, {})
    assert known is not None and "predicted" in known[1]
    assert known[0] * 1e6 == pytest.approx(microseconds, rel=0.2)


# --- which kernel SGLang takes ----------------------------------------------------------------------------------------


def test_forty_and_eight_heads_take_flashinfer() -> None:
    """As their neighbours do: 48 and 8, 40 and 4. Shards of Llama 4 were timed with SGLang's own kernel."""

    def prompt(heads: int, kv_heads: int) -> tuple[float, str]:
        known = time_by_sglang(ExtendAttention(Prompt(1, 4096, heads, kv_heads, 128, 128)), CARD)
        assert known is not None
        return known[0] / heads, known[1]

    whole, near = prompt(40, 8), [prompt(48, 8), prompt(40, 4)]
    assert whole[1] == TIMED
    assert all(0.85 < whole[0] / other < 1.15 for other, _ in near)
    shard = prompt(20, 4)
    assert shard[1] == PREDICTED and shard[0] > 1.7 * whole[0]
    keys = time_by_sglang(DecodeAttention(Keys(16, 4096, 40, 8, 128, 128)), CARD)
    assert keys is not None and keys[1] == TIMED


# --- cards that nobody timed ------------------------------------------------------------------------------------------

SHAPES = (
    "linear tokens=1 rows=4096 cols=7168",
    "linear tokens=64 rows=4096 cols=7168 scheme=fp8_block",
    "linear tokens=16 rows=4096 cols=7168 scheme=nvfp4",
    "fused_moe tokens=1 num_experts=128 top_k=4 hidden=2880 intermediate=2880 scheme=mxfp4 bias=1",
    "fused_moe tokens=64 num_experts=128 top_k=8 hidden=2048 intermediate=768 scheme=fp8_block",
    "decode_attention batch=16 context=4096 heads=32 kv_heads=8 head_dim=128",
    "extend_attention batch=1 new=4096 heads=32 kv_heads=8 head_dim=128",
)


@pytest.mark.parametrize("product", BY_DATA_SHEET)
def test_a_card_by_its_data_sheet_has_wider_errors(product: str) -> None:
    arch = arch_by_name(product)
    ceilings = ceilings_of(arch)
    assert not ceilings.measured and 0.8 * arch.bandwidth < ceilings.read < arch.bandwidth
    for operand, rate in ceilings.products.items():
        assert 0.7 < rate / rates_of(arch).matrix[operand] < 1, operand
    for shape in SHAPES:
        op = parse_shape(shape)
        ours, timed = predicted(op, arch), predicted(op, CARD)
        assert ours is not None and timed is not None and "by its data sheet" in ours.how
        assert 0.3 < ours.error and timed.error < ours.error, shape
        assert best(op, arch) is None and time_by_sglang(op, arch) is None
        if arch.bandwidth < CARD.bandwidth and arch.num_sms < CARD.num_sms:
            assert ours.seconds > timed.seconds, shape


def test_data_sheets_agree_with_their_clocks() -> None:
    """1,024 operations of 16 bits a clock and SM, half of that on GeForce parts. A GB10's are ratios of its FP4."""
    for product, rates in RATES.items():
        arch = arch_by_name(product)
        if "mma_sync_block_scale" in arch.features and product != "gb10":
            of_clock = 512 if product.startswith("rtx-50") else 1024
            assert rates.matrix["half"] == pytest.approx(arch.num_sms * of_clock * rates.clock, rel=0.1), product
            assert product in BY_DATA_SHEET or product in CEILINGS


@pytest.mark.parametrize("product", BY_DATA_SHEET)
def test_the_commands_know_these_cards(product: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--arch", product, "--shape", SHAPES[1], "--shape", SHAPES[3]]) == 0
    said = capsys.readouterr().out
    assert f"Nobody timed kernels on {product}" in said and "30% are added" in said
    if product not in PLANNED:
        return
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3.json").read_text())
    assert main(["plan", "--model-path", str(tmp_path), "--gpu", product, "--gpus", "2", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts
    for layout in layouts:
        one = layout["predicted"]["decode_one"]
        assert 0 < one["low"] < 0.85 * one["seconds"] and one["high"] > 1.15 * one["seconds"]


def test_ranges_of_steps_are_wider_than_on_the_card_that_was_timed(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3.json").read_text())
    model = describe_model(config, quantization_of(config, tmp_path, None, "default"), source="qwen3")
    parallel = ParallelConfig("bfloat16", "bfloat16")

    def width(product: str) -> float:
        time = total(time_step(model, parallel, decode_step(16), arch_by_name(product)))
        return (time.high - time.low) / time.seconds

    assert width("rtx-5090") > 1.8 * width("rtx-pro-6000-server")
    assert width("gb10") > 1.8 * width("rtx-pro-6000-server")


def test_a_product_of_one_row_reads_its_weights_at_what_the_card_reads() -> None:
    op = Linear(1, 16384, 16384)
    for product in BY_DATA_SHEET:
        arch = arch_by_name(product)
        time = predicted(op, arch)
        assert time is not None
        assert op.num_bytes / arch.bandwidth < time.seconds < 1.5 * op.num_bytes / arch.bandwidth
