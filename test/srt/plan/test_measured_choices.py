"""A plan with times that were measured on its GPU: which kernels and tiles change, and what it says of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from sglang import explain
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.measured.questions import (
    BUCKETS,
    attention_question,
    bucket_ranges,
    candidate_name,
    kernel_question,
    name_of_config,
    product_question,
)
from sglang.srt.kernels.measured.records import Question, Record, Setting, to_bytes
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.plan_items import plan_items
from sglang.srt.server_args import ServerArgs

CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
GIB = 1024**3
SETTING = Setting("a GPU", "1", "3.9.0", "2.13.0", "0.2.0", "abc", "600", "3090")


def plan_of(folder: Path, name: str, measured: MeasuredChoices = NOT_MEASURED, arch: str = "sm_120") -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    args = ServerArgs.from_kwargs(model_path=str(folder), load_format="dummy", quantization=None)
    model = ModelConfig.from_server_args(args)
    return make_plan(
        args, model, arch_by_name(arch), 900 * GIB, frozenset({"triton"}), advises=False, measured=measured
    )


def times(question: Question, **seconds: float) -> list[Record]:
    """Records without noise."""
    return [Record(question, name, (each,) * 3, 83e-6) for name, each in seconds.items()]


def measured_by(*records: Record) -> MeasuredChoices:
    return MeasuredChoices.of({(record.question, record.candidate): record for record in records})


def test_buckets_have_every_step_once() -> None:
    spans = list(bucket_ranges())
    assert spans[0] == (1, 1) and spans[-1][1] == BUCKETS[-1]
    assert all(after[0] == before[1] + 1 for before, after in pairwise(spans))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A model with quantized linear layers and experts."""
    folder = tmp_path_factory.mktemp("model")
    return folder, plan_of(folder, "deepseek_v3")


def test_a_linear_layer_takes_the_tile_that_was_faster_in_its_range_only(fp8: tuple[Path, Plan]) -> None:
    folder, plan = fp8
    key = "linear/fp8_block"
    choice, configs = plan.choices[key], plan.tile_configs[key]
    shape = next(iter(configs.by_shape))
    table = config_for(configs.by_shape[shape], 64)
    others = [each for each in choice.make_alternatives(plan.arch, shape, 64) if each.tiles != table.tiles]
    assert len(others) >= 2 and len({name_of_config(each) for each in others}) == len(others)
    question = product_question(choice.need, shape, 64)
    records = times(question, **{name_of_config(table): 9e-5, name_of_config(others[0]): 7.1e-5})
    changed = plan_of(folder, "deepseek_v3", measured_by(*records))

    for tokens in (*range(1, 300), 1000, 8192, 20000):
        for each, before in configs.by_shape.items():
            now = config_for(changed.tile_configs[key].by_shape[each], tokens)
            in_range = each is not None and each[:2] == shape[:2] and 33 <= tokens <= 64
            expected = others[0] if in_range else config_for(before, tokens)
            assert (now.variant, now.candidates) == (expected.variant, expected.candidates), (each, tokens)
    said = "measured here: 71 us, predicted 83; the table's took 90 us, predicted 83"
    assert config_for(changed.tile_configs[key].by_shape[shape], 50).why == said
    line = f"{shape[0]}x{shape[1]}, 33 to 64 tokens: {said}"
    assert changed.tile_configs[key].measured == (line,)
    assert changed.describe()["kernels"][key]["measured"] == [line]
    assert "measured" not in plan.describe()["kernels"][key]
    assert {33, 64} & set(changed.bucket_sizes(8192)) == {64}, "warm-up launches it"
    assert plan_items(changed)[0] != plan_items(plan)[0], "ranks compare it"


def test_what_is_no_faster_leaves_the_tiles_and_says_the_time(fp8: tuple[Path, Plan]) -> None:
    folder, plan = fp8
    choice, configs = plan.choices["fused_moe"], plan.tile_configs["fused_moe"].by_shape[None]
    table = config_for(configs, 16)
    other = next(each for each in choice.make_alternatives(plan.arch, None, 16) if each.tiles != table.tiles)
    question = product_question(choice.need, None, 16)
    slower = times(question, **{name_of_config(table): 9e-5, name_of_config(other): 9e-5})
    same = plan_of(folder, "deepseek_v3", measured_by(*slower)).tile_configs["fused_moe"]
    assert same.by_shape == {None: configs} and same.measured == ("9 to 16 tokens: measured here: 90 us, predicted 83",)
    faster = times(question, **{name_of_config(table): 9e-5, name_of_config(other): 5e-5})
    changed = plan_of(folder, "deepseek_v3", measured_by(*faster)).tile_configs["fused_moe"].by_shape[None]
    assert (
        config_for(changed, 16).tiles == other.tiles and config_for(changed, 17).tiles == config_for(configs, 17).tiles
    )


def test_a_record_of_what_is_not_possible_does_not_count(fp8: tuple[Path, Plan]) -> None:
    folder, plan = fp8
    table = config_for(plan.tile_configs["fused_moe"].by_shape[None], 16)
    question = product_question(plan.choices["fused_moe"].need, None, 16)
    alien = candidate_name("tiles", ({"BLOCK_M": 1024, "BLOCK_N": 1024},) * 2)
    records = times(question, **{name_of_config(table): 9e-5, alien: 1e-6})
    assert plan_of(folder, "deepseek_v3", measured_by(*records)).tile_configs["fused_moe"].by_shape == {
        None: plan.tile_configs["fused_moe"].by_shape[None]
    }


@pytest.mark.parametrize("arch", ["sm_120", "sm_90"])
def test_every_alternative_is_one_of_the_tables_or_of_the_tuning_file(fp8: tuple[Path, Plan], arch: str) -> None:
    plan = plan_of(fp8[0], "deepseek_v3", arch=arch)
    for key, cut in plan.tile_configs.items():
        if not plan.choices[key].spec.alternatives:
            continue
        for shape, configs in cut.by_shape.items():
            for tokens in (1, 2, 16, 256, 8192):
                names = [name_of_config(each) for each in plan.choices[key].make_alternatives(plan.arch, shape, tokens)]
                assert len(names) == len(set(names)) and len(names) >= 2 - (key == "fused_moe")
                if config_for(configs, tokens).variant != "few pairs":
                    assert name_of_config(config_for(configs, tokens)) in names, (key, shape, tokens)


def test_attention_takes_the_faster_tile_and_16_bit_weights_the_faster_kernel(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "model", "qwen3")
    decode, linear = plan.choices["decode_attention"], plan.choices["linear"]
    assert decode.tile is not None and decode.smaller_tiles and linear.name == "triton_gemv"
    names = [candidate_name("tiles", (tile,)) for tile in (decode.tile, decode.smaller_tiles[0])]
    records = times(attention_question(decode.need), **{names[0]: 9e-5, names[1]: 7.1e-5})
    records += times(kernel_question(linear.need), triton_gemv=9e-5, cublas=7.1e-5)
    changed = plan_of(tmp_path / "model", "qwen3", measured_by(*records))
    now = changed.choices["decode_attention"]
    assert now.tile == decode.smaller_tiles[0] and now.smaller_tiles[0] == decode.tile
    assert now.record is not None and now.record != decode.record
    assert changed.tile("decode_attention") == now.tile
    assert changed.choices["linear"].name == "cublas" and changed.choices["linear"].note == now.note
    assert now.note == "measured here: 71 us, predicted 83; the table's took 90 us, predicted 83"


def test_explain_prints_both_and_a_flag_ignores_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(tmp_path / "model", "qwen3")
    decode = plan.choices["decode_attention"]
    assert decode.tile is not None
    names = [candidate_name("tiles", (tile,)) for tile in (decode.tile, decode.smaller_tiles[0])]
    records = times(attention_question(decode.need), **{names[0]: 9e-5, names[1]: 7.1e-5})
    file = tmp_path / "times.json"
    file.write_bytes(to_bytes(SETTING, {(each.question, each.candidate): each for each in records}))

    def said(*argv: str) -> str:
        assert explain.main(["--arch", "sm_120", "--model-path", str(tmp_path / "model"), *argv]) == 0
        return " ".join(capsys.readouterr().out.split())

    reason = "because measured here: 71 us, predicted 83; the table's took 90 us, predicted 83"
    assert reason in said("--measured", str(file)) and reason not in said()
    assert reason not in said("--measured", str(file), "--no-measured-choices")
    note = json.loads(said("--measured", str(file), "--json"))["ops"]["decode_attention"]["note"]
    assert note == reason.removeprefix("because ")
    file.write_bytes(to_bytes(SETTING, {}))
    assert explain.main(["--arch", "sm_120", "--model-path", str(tmp_path / "model"), "--measured", str(file)]) == 0
    assert f"{file} has no times of what this model launches" in capsys.readouterr().err
    file.write_text("{}")
    assert explain.main(["--arch", "sm_120", "--model-path", str(tmp_path / "model"), "--measured", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
