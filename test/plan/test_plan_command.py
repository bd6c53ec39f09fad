"""`sglang plan`: figures beside published logs, floors beside arithmetic by hand, and that it loads no torch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from srt.configs.gguf_files import convert
from srt.models.harness import save_tiny

from sglang.cli import main
from sglang.explain import explain
from sglang.plan import layouts
from sglang.plan.floors import StepFloors, _entries_of_all, nccl_seconds
from sglang.plan.layouts import Layout
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_planner import parallel_config_of
from sglang.srt.server_args import ServerArgs

GIB = 1024**3
CONFIGS = Path(__file__).parents[1] / "srt" / "kernels" / "configs"


def model_dir(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def floors(directory: str, tp_size: int = 1) -> StepFloors:
    args = ServerArgs.from_cli(["--model-path", directory, "--tp-size", str(tp_size)])
    explained = explain(args, arch_by_name("rtx-pro-6000-server"), frozenset({"triton"}))
    choices = {outcome.need.key: outcome for outcome in explained.outcomes if isinstance(outcome, Choice)}
    parallel = parallel_config_of(args, explained.model.dtype, explained.model)
    return StepFloors(explained.model, parallel, explained.arch, choices)


def test_glm47_is_what_its_log_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """41.90 GiB of weights and 864,247 tokens on eight cards with 94.13 GiB free, of which 0.848 were used."""
    flags = ["--gpus", "8", "--gpu", "rtx-pro-6000", "--free-memory", "94.13", "--mem-fraction-static", "0.848"]
    result = planned(capsys, "--model-path", model_dir(tmp_path, "glm47"), *flags)
    layout = next(layout for layout in result["layouts"] if layout["layout"] == "TP 8")
    assert layout["weights"] / GIB == pytest.approx(41.90, rel=0.01)
    assert layout["tokens"] == pytest.approx(864_247, rel=0.02)
    assert "sms=188" in result["tuned_files"]["TP 8"]
    assert layout["commands"] == [f"sglang serve --model-path {tmp_path} --mem-fraction-static 0.848 --tp 8"]
    names = {layout["layout"] for layout in result["layouts"]}
    assert names >= {"TP 6", "TP 8", "TP 4 x PP 2"} and result["recommended"] == "TP 8"
    assert {refused["layout"] for refused in result["refused"]} >= {"TP 4 x 2 servers"}
    stages = next(layout for layout in result["layouts"] if layout["layout"] == "TP 4 x PP 2")
    assert stages["weights"] / layout["weights"] == pytest.approx(1.0, abs=0.03), (
        "half of the layers, twice as much of each"
    )
    assert stages["commands"][0].endswith("--tp 4 --pp 2")
    turn = floors(str(tmp_path), 4).decode(32, 8192)
    assert stages["decode_load"]["read_bytes"] == round(turn.read_bytes), "two stages compute 32 of 64 requests each"
    assert stages["tokens_per_second_at_most"] == pytest.approx(64 / turn.seconds_with_nccl)


def test_stages_are_recommended_by_how_much_they_are_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many short requests: four cards and two stages served more of them than eight cards, as others measured."""
    load = ["--concurrency", "384", "--length", "200", "--gpus", "8", "--gpu", "rtx-pro-6000"]
    assert main(["plan", "--model-path", model_dir(tmp_path, "glm47"), *load]) == 0
    said = capsys.readouterr().out
    assert "Recommended: TP 4 x PP 2" in said and re.search(r"of which that is 1\.\d\d times", said)


def test_whole_experts_on_each_rank_are_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 128 do not divide MiniMax's experts by eight."""
    words = ["--model-path", model_dir(tmp_path, "minimax_m2"), "--gpus", "8", "--gpu", "rtx-pro-6000"]
    result = planned(capsys, *words)
    names = {layout["layout"] for layout in result["layouts"]}
    assert "TP 8 EP 8" in names and "TP 8" not in names
    assert "TP 8" in {refused["layout"] for refused in result["refused"]}
    whole = next(layout for layout in result["layouts"] if layout["layout"] == "TP 8 EP 8")
    assert whole["commands"][0].endswith("--tp 8 --ep 8")


def test_a_dense_step_reads_its_weights_and_its_cache(tmp_path: Path) -> None:
    step = floors(model_dir(tmp_path, "qwen3"))
    config = json.loads((CONFIGS / "qwen3.json").read_text())
    hidden, inter, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    block = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inter
    head = config["vocab_size"] * hidden
    floor = step.decode(4, 1000)
    assert floor.read_bytes == 2 * (layers * block + head) + 4 * 1000 * 2 * 2 * kv * layers
    assert floor.flops == 4 * (2 * (layers * block + head) + 2 * 1000 * 2 * q * layers)
    assert floor.seconds == floor.read_bytes / 1597e9
    prompt = step.prefill(1000)
    assert prompt.flops == 2 * (1000 * layers * block + head) + 2 * (1000 * 1001 / 2) * 2 * q * layers
    assert prompt.flop_seconds == pytest.approx(prompt.flops / 504e12)


def test_experts_are_read_as_they_are_chosen(tmp_path: Path) -> None:
    step = floors(model_dir(tmp_path, "qwen3_moe"))
    assert step.model.experts is not None
    share, experts = step.model.experts.top_k / step.model.experts.num_experts, step._weight_bytes(10**6)
    fixed = (step._weight_bytes(1) - share * experts) / (1 - share)
    assert 0 < fixed < step._weight_bytes(1) < step._weight_bytes(8) < experts
    assert step._weight_bytes(2) == pytest.approx(fixed + (1 - (1 - share) ** 2) * (experts - fixed))


def test_windows_and_chosen_tokens_bound_what_is_read(tmp_path: Path) -> None:
    step = floors(model_dir(tmp_path, "gpt_oss"))
    short, long = step._cache_bytes(10_000), step._cache_bytes(20_000)
    whole = 2 * short - long  # of windows, which no longer request has more of
    of_layer = 2 * 8 * 64 * 2
    assert whole == 128 * of_layer * 18
    assert long - short == 10_000 * of_layer * 18
    assert [_entries_of_all(length, min(3, length), 1) for length in (2, 3, 5)] == [3, 6, 12]


def test_sparse_attention_reads_the_indexers_choice(tmp_path: Path) -> None:
    step = floors(model_dir(tmp_path, "deepseek_v32"), 8)
    grown = step._cache_bytes(20_000) - step._cache_bytes(10_000)
    assert grown == 10_000 * 61 * 132, "beyond 2,048 tokens only keys of the indexer"


def test_all_reduces_send_what_a_ring_sends(tmp_path: Path) -> None:
    floor = floors(model_dir(tmp_path, "qwen3"), 2).decode(3, 100)
    config = json.loads((CONFIGS / "qwen3.json").read_text())
    reduces = 1 + 2 * config["num_hidden_layers"]
    assert floor.reduced_bytes == reduces * 3 * config["hidden_size"] * 2
    assert floor.nccl_seconds == reduces * nccl_seconds(2, 3 * config["hidden_size"] * 2)


@pytest.mark.parametrize(
    ("ranks", "message", "seconds"),
    [(2, 1, 6.6e-6), (2, 65536, 10.5e-6), (3, 4096, 13.5e-6), (8, 1 << 20, 194e-6), (16, 1 << 21, 358.7e-6)],
)
def test_nccl_between_its_measured_sizes(ranks: int, message: int, seconds: float) -> None:
    assert nccl_seconds(ranks, message) == pytest.approx(seconds, rel=0.01)


def test_several_servers_of_a_machine_are_replicas() -> None:
    words = ["--model-path", "a b"]
    assert Layout(2, 2).commands(words) == ["sglang serve --model-path 'a b' --tp 2 --dp 2"]
    assert Layout(2, 2).commands(words, a_machine=1) == ["sglang serve --model-path 'a b' --tp 2"]


def test_a_layout_without_room_for_a_request_is_not_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model-path", model_dir(tmp_path, "qwen3"), "--gpu", "rtx-pro-6000-workstation"]
    result = planned(capsys, *words, "--length", "1000000")
    assert result["recommended"] is None
    assert result["layouts"][0]["tokens_per_second_at_most"] == 0
    assert main(["plan", *words, "--length", "1000000"]) == 0
    assert "No recommendation: no layout holds a request of 1,000,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus must be from 1 to 1,024; got 0."),
        (["--length", "0"], "--length must be from 1"),
        (["--gpu", "rtx-7090"], "unknown architecture or product 'rtx-7090'; known: "),
        (["--no-such-flag"], "--no-such-flag"),
        (["--main-memory", "-5"], "--main-memory must be from 0 to 1,048,576 GiB; got -5."),
        (["--main-memory", "nan"], "--main-memory must be from 0 to 1,048,576 GiB; got nan."),
        (["--free-memory", "inf"], "--free-memory must be from 0 to 1,048,576 GiB; got inf."),
        (["--memory-channels", "1000000000"], "--memory-channels must be from 0 to 64; got 1,000,000,000."),
    ],
)
def test_bad_words_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    gpu = [] if "--gpu" in words else ["--gpu", "rtx-5090"]
    assert main(["plan", "--model-path", model_dir(tmp_path, "qwen3"), *gpu, *words]) == 2
    assert message in capsys.readouterr().err


def test_it_runs_where_torch_and_triton_are_not_installed(tmp_path: Path) -> None:
    """And recommends no whole experts on each rank where the blocks of a model do divide them."""
    script = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from sglang.plan.command import run_plan; run_plan(sys.argv[1:])"
    )
    words = ["--model-path", model_dir(tmp_path, "glm47"), "--gpus", "8", "--gpu", "rtx-pro-6000"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search("Recommended: TP 8(?! EP)", done.stdout) and "Floors are lower bounds" in done.stdout


def test_a_session_that_returns_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where main memory is the GPU's own nothing is loaded."""
    words = ["--model-path", model_dir(tmp_path, "gpt_oss"), "--length", "65536", "--concurrency", "1"]
    result = planned(capsys, *words, "--gpu", "rtx-pro-6000")
    (layout,) = [layout for layout in result["layouts"] if layout["layout"] == result["recommended"]]
    # The full attention of every other one of 36 layers: keys and values of 8 heads of 64, in 16 bits.
    assert layout["loaded"]["bytes"] == 65536 * 18 * 2 * 8 * 64 * 2
    assert 0 < layout["loaded"]["seconds"] < layout["predicted"]["prefill"]["seconds"]
    assert any("NUMA node" in reason for reason in result["reasons"])
    spark = planned(capsys, *words, "--gpu", "gb10")
    assert {layout["loaded"]["bytes"] for layout in spark["layouts"]} == {0}
    assert not any("NUMA node" in reason for reason in spark["reasons"])


def test_steps_are_predicted_with_their_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recommendation rests on predictions, which lie above the floors; not so on a card that nobody timed."""
    words = ["--model-path", model_dir(tmp_path, "gpt_oss"), "--gpus", "2", "--length", "2048", "--concurrency", "16"]
    result = planned(capsys, *words, "--gpu", "rtx-pro-6000")
    best = max(
        (layout for layout in result["layouts"] if "EP" not in layout["layout"]),
        key=lambda layout: layout["predicted"]["tokens_per_second"]["predicted"],
    )
    assert result["recommended"] == best["layout"] and result["reasons"][0].startswith("predicted ")
    for layout in result["layouts"]:
        for step in ("decode_one", "decode_load", "prefill"):
            time = layout["predicted"][step]
            assert layout[step]["seconds"] < time["seconds"] and time["low"] < time["seconds"] < time["high"]
        speeds = layout["predicted"]["tokens_per_second"]
        assert speeds["low"] < speeds["predicted"] < speeds["high"]
        assert speeds["predicted"] == pytest.approx(
            layout["servers"]
            * layout["decode_load"]["requests_per_server"]
            / layout["predicted"]["decode_load"]["seconds"]
        )
    assert main(["plan", *words, "--gpu", "rtx-pro-6000"]) == 0
    assert "Predicted, not measured" in capsys.readouterr().out
    unknown = planned(capsys, "--model-path", str(tmp_path), "--gpus", "4", "--gpu", "l40s")
    assert unknown["layouts"][0]["predicted"] is None and unknown["reasons"][0].startswith("at most ")


def test_predictions_are_of_the_libraries_that_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("library_prompts", "library_latents", "sgl_kernel_experts")
    seen: list[ParallelConfig] = []

    def explained(*given: Any, **options: Any) -> Any:
        one = explain(*given, **options)
        return replace(one, parallel=replace(one.parallel, **dict.fromkeys(flags, True)))

    def predict(model: Any, parallel: ParallelConfig, *_: Any) -> None:
        seen.append(parallel)

    monkeypatch.setattr(layouts, "explain", explained)
    monkeypatch.setattr(layouts, "predict", predict)
    words = ["--model-path", model_dir(tmp_path, "qwen3")]
    layouts.survey(words, 1, arch_by_name("rtx-pro-6000"), layouts.Load(1024, 1), None)
    assert seen and all(getattr(parallel, flag) for parallel in seen for flag in flags)


@pytest.mark.parametrize(("requests", "published"), [pytest.param(64, 1028, marks=pytest.mark.thorough), (512, 4500)])
def test_predictions_for_the_concurrency_that_was_asked(
    requests: int, published: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GLM-4.7 on eight cards as its log has it: from 64 requests on within 30% (published figures)."""
    words = ["--model-path", model_dir(tmp_path, "glm47"), "--gpus", "8", "--gpu", "rtx-pro-6000", "--length", "256"]
    result = planned(capsys, *words, "--concurrency", str(requests))
    layout = next(layout for layout in result["layouts"] if layout["layout"] == "TP 8")
    predicted = layout["predicted"]["tokens_per_second"]["predicted"]
    assert layout["decode_load"]["requests_per_server"] == requests
    assert 0.7 < predicted / published < 1.2


def test_machines_of_one_gpu_have_a_server_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_dir(tmp_path, "qwen3")
    result = planned(capsys, "--model-path", model, "--gpu", "dgx-spark", "--gpus", "2")
    assert [layout["layout"] for layout in result["layouts"]] == ["TP 1 x 2 servers"]
    assert result["layouts"][0]["commands"] == [f"sglang serve --model-path {model} --tp 1"]
    assert "--nodes 2 has layouts across machines" in result["reasons"][-1]


def test_two_sparks_share_a_model_that_one_has_no_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MiniMax-M2.7 NVFP4: 62.6 GiB of each, with room for the cache; the link between them is counted."""
    config = json.loads((CONFIGS / "minimax_m2.json").read_text())
    whole = ["lm_head", "*block_sparse_moe.gate", "*self_attn*"]
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": whole}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model-path", str(tmp_path), "--gpu", "gb10", "--length", "32768", "--concurrency", "8"]
    result = planned(capsys, *words, "--nodes", "2")
    assert (result["gpus"], result["nodes"]) == (2, 2)
    layouts = {layout["layout"]: layout for layout in result["layouts"]}
    assert {"TP 2 on 2 machines", "TP 1 x PP 2 on 2 machines"} <= set(layouts)
    assert [refused["layout"] for refused in result["refused"]] == ["TP 1 x 2 servers"]
    shared = layouts["TP 2 on 2 machines"]
    assert result["recommended"].startswith("TP 2") and shared["weights"] / GIB == pytest.approx(62.6, rel=0.01)
    assert shared["requests"] >= 6 and shared["predicted"] is None
    serve = f"sglang serve --model-path {tmp_path} --tp 2 --nnodes 2 --dist-init-addr 10.0.0.1:50000 --node-rank"
    assert shared["commands"] == [f"{serve} 0", f"{serve} 1"]
    load = shared["decode_load"]
    assert load["link_seconds"] == pytest.approx(load["all_reduce_bytes"] / 25e9)
    assert layouts["TP 1 x PP 2 on 2 machines"]["decode_load"]["link_seconds"] == 0.0
    assert main(["plan", *words, "--nodes", "2"]) == 0
    assert "nobody has measured collectives" in capsys.readouterr().out
    for wrong, text in ((["--gpus", "3"], "does not divide --gpus 3"), (["--gpus", "4"], "are 2 GPUs a machine")):
        assert main(["plan", *words, "--nodes", "2", *wrong]) != 0
        assert text in capsys.readouterr().err


def test_layouts_of_machines_of_eight() -> None:
    """Stages of eight ranks stay on a machine; replicas are those of one."""
    assert not Layout(8, 1, pp_size=2, machines=2).crosses_machines and Layout(16, 1, machines=2).crosses_machines
    assert not Layout(4, 1, pp_size=4, machines=2).crosses_machines and Layout(2, 3).crosses_machines is False
    assert Layout(4, 4).commands(["-x"], a_machine=2) == ["sglang serve -x --tp 4 --dp 2"]


def test_latents_shared_out_hold_nearly_as_many_times_the_tokens(tmp_path: Path) -> None:
    """Kimi K2.6 NVFP4 on eight cards; others report 3.81 million tokens in the place of 479,000."""
    (tmp_path / "hf_quant_config.json").write_text((CONFIGS / "kimi_k26_nvfp4.hf_quant_config.json").read_text())
    words = ["--model-path", model_dir(tmp_path, "kimi_k26_nvfp4"), "--tp-size", "8", "--dcp-size", "8"]
    explained = explain(ServerArgs.from_cli(words), arch_by_name("rtx-pro-6000-server"), frozenset({"triton"}))
    assert explained.problem is None and explained.plan is not None and explained.plan["page_size"] == 8
    (note,) = (note for note in explained.notes if "--dcp-size" in note)
    found = re.search(r"holds ([0-9,]+) tokens in the place of ([0-9,]+)\. It costs two .* in 61 layers", note)
    assert found is not None
    shared, whole = (int(number.replace(",", "")) for number in found.groups())
    assert explained.plan["max_total_num_tokens"] == shared and 7.2 < shared / whole < 8
    small = explain(ServerArgs.from_cli(words), arch_by_name("rtx-pro-6000-server"), frozenset({"triton"}), 60 * GIB)
    assert small.unfit is not None and "What helps: more GPUs (--tp-size 16)" in small.unfit


def test_layouts_that_share_out_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf_quant_config.json").write_text((CONFIGS / "kimi_k26_nvfp4.hf_quant_config.json").read_text())
    words = ["--model-path", model_dir(tmp_path, "kimi_k26_nvfp4"), "--gpus", "2", "--gpu", "rtx-pro-6000"]
    result = planned(capsys, *words, "--free-memory", "500")
    layouts = {layout["layout"]: layout for layout in result["layouts"]}
    whole, shared = layouts["TP 2"], layouts["TP 2 DCP 2"]
    assert 1.9 < shared["tokens"] / whole["tokens"] < 2 and shared["weights"] == whole["weights"]
    assert shared["decode_one"]["read_bytes"] < whole["decode_one"]["read_bytes"]
    assert shared["decode_one"]["nccl_seconds"] > whole["decode_one"]["nccl_seconds"] + 2 * 61 * 6e-6
    assert shared["decode_one"]["flops"] == pytest.approx(whole["decode_one"]["flops"], rel=1e-3)
    assert shared["predicted"]["decode_one"]["seconds"] > whole["predicted"]["decode_one"]["seconds"]
    assert shared["commands"][0].endswith("--tp 2 --dcp-size 2")
    groups, gains = layouts["TP 2 DP attention 2"], {gain["layout"]: gain for gain in result["gains"]}
    assert groups["weights"] > whole["weights"] and groups["commands"][0].endswith("--attn-dp-size 2")
    assert groups["tokens"] > 1.9 * whole["tokens"] and groups["requests"] > 1.9 * whole["requests"]
    assert set(gains) == {"TP 2 DCP 2", "TP 2 DP attention 2", "TP 2 EP 2 DP attention 2"}
    for name, gain in gains.items():
        beside = layouts[gain["beside"]]
        assert gain["tokens"] == layouts[name]["tokens"] / beside["tokens"]
        longer = layouts[name]["predicted"]["decode_one"]["seconds"] - beside["predicted"]["decode_one"]["seconds"]
        assert gain["decode_one_seconds"] == pytest.approx(longer)


PUBLISHED = Path(__file__).parents[1] / "srt" / "kernels" / "published"
DEPLOYMENTS = {
    "GLM-4.7-FP8": ("glm47", ["--gpus", "8"], "TP 4 x PP 2"),
    "GLM-5.1-NVFP4": ("GLM-5.1-NVFP4", ["--gpus", "6"], "TP 2 x PP 3"),
    "Kimi-K2.5-NVFP4": ("kimi_k25_nvfp4", ["--gpus", "8"], "TP 8 DCP 8"),
    "Kimi-K2.6-NVFP4": ("kimi_k26_nvfp4", ["--gpus", "8"], "TP 8 DCP 8"),
    "DeepSeek-V3.1-NVFP4": ("deepseek_v31_nvfp4", ["--gpus", "8"], "TP 8 DP attention 8"),
    "DeepSeek-V3.1-NVFP4, stages": ("deepseek_v31_nvfp4", ["--gpus", "8"], "TP 4 x PP 2 DP attention 4"),
}
"""Models, cards, and a layout that the plan must have beside others."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_recommendation_is_the_predicted_best(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, gpus, layout = DEPLOYMENTS[name]
    if (quant := CONFIGS / f"{config}.hf_quant_config.json").exists():
        (tmp_path / "hf_quant_config.json").write_text(quant.read_text())
    folder = str(PUBLISHED / config) if (PUBLISHED / config).exists() else model_dir(tmp_path, config)
    result = planned(capsys, "--model-path", folder, "--gpu", "rtx-pro-6000", *gpus)
    layouts = {row["layout"]: row for row in result["layouts"]}
    assert layouts[layout]["requests"] > 0
    speeds = {
        name: row["predicted"]["tokens_per_second"]["predicted"] * (0.9 if row["ep_size"] > 1 else 1)
        for name, row in layouts.items()
    }
    best = result["recommended"]
    assert speeds[best] >= max(speeds.values()) / 1.02
    found = re.search(r"([\d,]+), of which that is ([\d.]+) times", result["reasons"][0])
    assert found is not None
    second = max(speed for name, speed in speeds.items() if name != best)
    assert float(found.group(2)) == pytest.approx(speeds[best] / second, rel=0.12)


def test_two_sparks_share_what_one_has_no_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-path", str(PUBLISHED / "MiniMax-M2.7-NVFP4"), "--nodes", "2", "--gpu", "gb10"]
    result = planned(capsys, *words)
    assert result["recommended"] == "TP 2 on 2 machines"
    assert "TP 1 x 2 servers" in {refused["layout"] for refused in result["refused"]}
    assert "of which that is 0.9" in result["reasons"][0] and "the busiest one is slower" in result["reasons"][0]


@pytest.mark.parametrize("name", ["deepseek_v4", "glm5"])
def test_no_command_for_a_model_that_is_not_served(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model-path", model_dir(tmp_path, name), "--gpu", "rtx-pro-6000", "--page-size", "128")
    words += ("--free-memory", "2000")
    result = planned(capsys, *words)
    if result["not_implemented"] is not None:
        assert result["recommended"] is None and result["reasons"][0].startswith("no server starts: ")
        assert main(["plan", *words]) == 0
        assert "sglang serve" not in capsys.readouterr().out


def test_a_layout_is_called_faster_only_if_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpt_oss", "qwen3_moe"):
        result = planned(capsys, "--model-path", model_dir(tmp_path, name), "--gpu", "rtx-pro-6000", "--gpus", "2")
        for reason in result["reasons"]:
            if "is faster: " in reason:
                other, here = re.findall(r"([\d,]+) (?:tok/s|here)", reason)
                assert int(other.replace(",", "")) > int(here.replace(",", "")), reason


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_commands_that_are_printed_start(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, "--model-path", model_dir(tmp_path, name), "--gpu", "rtx-pro-6000", "--gpus", "2")
    assert result["layouts"]
    for layout in result["layouts"]:
        words = shlex.split(layout["commands"][0].partition("sglang serve ")[2])
        args = ServerArgs.from_cli(words)
        assert explain(args, arch_by_name("rtx-pro-6000"), frozenset({"triton"}), advises=False).problem is None


def test_a_gguf_file_is_planned_from_its_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    save_tiny("llama_wide", tmp_path / "saved")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", lambda name: "Q4_0" if "ffn" in name else "F16")
    words = ("--gpu", "rtx-pro-6000-server", "--length", "128")
    in_gguf = planned(capsys, str(file), *words)
    saved = planned(capsys, "--model-path", str(tmp_path / "saved"), *words)
    weights = [result["layouts"][0]["weights"] for result in (in_gguf, saved)]
    assert weights[0] < weights[1]
