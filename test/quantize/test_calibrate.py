"""Calibration: the largest activations are transformers' own, and checkpoints that are made with them lose less."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from srt.models.harness import NativePlan, TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

from sglang.quantize.__main__ import main
from sglang.quantize.calibrate import calibrate
from sglang.quantize.export import UNCALIBRATED_INPUT_SCALE
from sglang.quantize.prompts import read_prompts
from sglang.quantize.rounding import compensated, fitted
from sglang.quantize.samples import BATCH_PROMPTS
from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.entrypoints.openai.built_in_templates import built_in_template
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.errors import UserError
from sglang.srt.kernels.op import Op
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.native_ops import gated
from sglang.srt.layers.ops import FUSED_MOE, QUANTIZED_LINEAR
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.srt.layers.quantization.reference import Quantized, dequantize, round_activation
from sglang.srt.managers.scheduler import scheduler_setup
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

LAYERS, EXPERTS = 3, 4
TEMPLATE = "{% for m in messages %}t7 {{ m.content }} {% endfor %}{% if add_generation_prompt %}t9{% endif %}"
LOUD = 3000.0


def save_tokenizer(folder: Path, bos: bool = False) -> None:
    """Words t0, t1, ... are the token ids; with `bos`, t8 begins every text."""
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(250)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("t8 $A", special_tokens=[("t8", 8)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_prompts(file: Path, prompts: list[list[int]]) -> str:
    file.write_text("\n".join(" ".join(f"t{i}" for i in ids) for ids in prompts) + "\n")
    return str(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny("qwen3_moe_wide", folder)
    save_tokenizer(folder)
    return folder


def reference(folder: Path, prompts: list[list[int]]) -> dict[str, float]:
    """Largest |x| of every module's input, from hooks; inside of the experts, which are one module there, by hand."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, float] = {}

    def see(module: str, x: torch.Tensor) -> None:
        found[module] = max(found.get(module, 0.0), x.abs().max().item())

    def linear(name: str) -> Callable[..., None]:
        return lambda module, inputs: see(name, inputs[0])

    def experts(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            x, ids = inputs[:2]
            for expert in ids.unique().tolist():
                own = x[(ids == expert).any(-1)]
                gate, up = F.linear(own, module.gate_up_proj[expert]).chunk(2, -1)
                for part, value in (("gate", own), ("up", own), ("down", F.silu(gate) * up)):
                    see(f"{name}.{expert}.{part}_proj", value)

        return hook

    for name, module in hf.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(linear(name))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(experts(name))
    for ids in prompts:
        hf_logits(hf, ids)
    return found


def test_recorded_maxima_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(3 + seed % 7, seed) for seed in range(BATCH_PROMPTS + 3)]
    got = calibrate(str(model), write_prompts(tmp_path / "prompts.txt", prompts), 10_000, "cpu")
    want = reference(model, prompts)
    assert len(want) == LAYERS * (4 + EXPERTS * 3)
    assert (got.num_prompts, got.num_tokens, got.unreached) == (len(prompts), sum(map(len, prompts)), frozenset())
    for module, value in want.items():
        assert got.largest[module] == pytest.approx(value, rel=1e-4), module
    layer = "model.layers.1.self_attn"
    assert got.largest[f"{layer}.q_proj"] == got.largest[f"{layer}.k_proj"] == got.largest[f"{layer}.v_proj"]


def test_products_are_those_of_the_inputs_in_transformers(model: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(5 + seed, seed) for seed in range(3)]
    file = write_prompts(tmp_path / "prompts.txt", prompts)
    got = calibrate(str(model), file, 10_000, "cpu", products=True).products
    inputs: dict[str, list[torch.Tensor]] = {}
    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args: inputs.setdefault(name, []).append(args[0].flatten(0, -2))

    for name, module in hf.named_modules():
        if "self_attn" in name and name.endswith("_proj"):
            module.register_forward_pre_hook(keep(name))
    for ids in prompts:
        hf_logits(hf, ids)
    assert len(inputs) == LAYERS * 4 and not any(".experts." in name for name in got)
    for name, rows in inputs.items():
        x = torch.cat(rows)
        torch.testing.assert_close(got[name], x.T @ x / len(x), rtol=1e-3, atol=1e-5, msg=name)
    assert not calibrate(str(model), file, 10_000, "cpu").products


def test_gptq_writes_what_compensates(model: Path, tmp_path: Path) -> None:
    """Modules with products of their inputs get GPTQ's weights, experts fitted ones."""
    file = write_prompts(tmp_path / "prompts.txt", [random_tokens(40, seed) for seed in range(4)])
    products = calibrate(str(model), file, 16384, "cpu", products=True).products
    target, scheme = tmp_path / "gptq", SCHEMES["nvfp4"]
    arguments = ["--model", str(model), "--scheme", "nvfp4", "--output", str(target), "--rounding", "gptq"]
    assert main([*arguments, "--calibrate", file, "--calibration-device", "cpu"]) == 0
    before, after = load_file(model / "model.safetensors"), load_file(target / "model.safetensors")

    def written(module: str) -> tuple[torch.Tensor, torch.Tensor]:
        factor = after[f"{module}.weight_scale_2"]
        q = Quantized(after[f"{module}.weight"], after[f"{module}.weight_scale"], factor)
        return dequantize(q, scheme), factor

    module = "model.layers.1.self_attn.o_proj"
    got, factor = written(module)
    assert torch.equal(
        got, dequantize(compensated(before[f"{module}.weight"], scheme, products[module], factor), scheme)
    )
    module = "model.layers.1.mlp.experts.0.down_proj"
    got, factor = written(module)
    assert torch.equal(got, dequantize(fitted(before[f"{module}.weight"], scheme, factor), scheme))


def test_gptq_needs_prompts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(model), "--scheme", "int4_g32", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--rounding", "gptq"]) == 2
    assert "--rounding gptq needs --calibrate FILE" in capsys.readouterr().err


def test_experts_that_no_token_reached(model: Path, tmp_path: Path) -> None:
    prompts = [[5]]
    got = calibrate(str(model), write_prompts(tmp_path / "prompts.txt", prompts), 10, "cpu")
    want = reference(model, prompts)
    assert len(got.unreached) == LAYERS * (EXPERTS - 2) * 3
    for module in got.unreached:
        layer, part = module.partition(".experts.")[0], module.rpartition(".")[2]
        others = [value for name, value in want.items() if name.startswith(layer) and name.endswith(part)]
        assert module not in want and len(others) == 2
        assert got.largest[module] == pytest.approx(max(others), rel=1e-4)


def read(
    folder: Path, max_tokens: int = 1000, longest: int = 1000, architecture: str = "LlamaForCausalLM"
) -> list[list[int]]:
    """Of the file and the tokenizer in `folder`."""
    args = ServerArgs(model_path=str(folder))
    return read_prompts(str(folder / "prompts"), args, architecture, max_tokens, longest)


def test_forms_of_prompts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, bos=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    chat = [{"role": "user", "content": "t1 t2"}]
    answered = [*chat, {"role": "assistant", "content": "t3"}]
    file = tmp_path / "prompts"
    lines = [{"text": "t4 t5"}, {"messages": chat}, {"messages": answered}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read(tmp_path) == [[8, 4, 5], [7, 1, 2, 9], [7, 1, 2, 7, 3]]
    file.write_bytes(b'\xef\xbb\xbf{"text": "t4"}\r\n')  # as some editors save it
    assert read(tmp_path) == [[8, 4]]


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"])
def test_conversations_of_a_model_without_a_template_of_its_own(tmp_path: Path, architecture: str) -> None:
    """The tokens are those of the prompt that a server renders, with the template's own special tokens."""
    save_tokenizer(tmp_path, bos=True)
    messages = [{"role": "user", "content": "t1 t2"}]
    (tmp_path / "prompts").write_text(json.dumps({"messages": messages}))
    args = ServerArgs(model_path=str(tmp_path))
    tokenizer, built_in = load_tokenizer(args), built_in_template(architecture, str(tmp_path))
    assert tokenizer is not None and tokenizer.chat_template is None and built_in is not None
    request = msgspec.convert({"messages": messages}, ChatCompletionRequest)
    text = ChatTemplate(built_in.source(), tokenizer.special_tokens).render(request)
    assert "<｜Assistant｜>" in text
    assert read(tmp_path, architecture=architecture) == [tokenizer.encode(text, add_special_tokens=False)]


def test_only_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "prompts").write_bytes(b"t1 t2 t3\n\nt4 t5 t6\n{broken\n")
    assert read(tmp_path) == [[1, 2, 3], [4, 5, 6], [0]]
    assert read(tmp_path, max_tokens=4) == [[1, 2, 3], [4]]
    assert read(tmp_path, longest=2) == [[1, 2], [4, 5], [0]]
    assert read(tmp_path, max_tokens=3) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("p.txt", None, [], "No such file"),
        ("p.txt", "\n \n", [], "no prompts"),
        ("p.txt", "", [], "no prompts"),
        ("p.txt", b"\xff\xfe", [], "decode"),
        ("p.jsonl", "t1 t2\n", [], "line 1: not JSON"),
        ("p.jsonl", '{"text": "t1"}\n["t1"]\n', [], 'line 2: expected {"text"'),
        ("p.jsonl", '{"text": 5}\n', [], 'line 1: expected {"text"'),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "t1"}]}\n', [], "need a chat template"),
        ("p.txt", "t1\n", ["--input-scales", "f"], "choose one"),
        ("p.txt", "t1\n", ["--calibration-tokens", "0"], "--calibration-tokens must be positive"),
        ("p.txt", "t1\n", ["--scheme", "int4_g32"], "--calibrate has no effect"),
        ("p.txt", "t1\n", ["--scheme", "fp8_tensor"], "add --static-activations"),
        ("p.txt", "t1\n", ["--static-activations"], "is for fp8_tensor"),
        ("p.txt", "t1\n", ["--include", "nothing"], "no weight that matches"),
        ("p.txt", "\n \n", ["--scheme", "int4_g32", "--rounding", "gptq"], "no prompts"),
        (
            "p.txt",
            "t1\n",
            ["--scheme", "fp8_block", "--rounding", "gptq"],
            "for schemes of four bits, not for fp8_block",
        ),
        ("p.txt", "t1\n", ["--scheme", "int4_g32", "--rounding", "fitted"], "--calibrate has no effect"),
    ],
)
def test_refusals(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    name: str, text: str | bytes | None, options: list[str], message: str,
) -> None:  # fmt: skip
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    arguments = ["--model", str(model), "--scheme", "nvfp4", "--output", str(tmp_path / "out"), *options]
    assert main([*arguments, "--calibrate", str(file), "--calibration-device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("role", "message"), [("wizard", "role"), ("user", "no users here")])
def test_conversations_that_do_not_render(tmp_path: Path, role: str, message: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    (tmp_path / "prompts").write_text(json.dumps({"messages": [{"role": role, "content": "t1"}]}))
    with pytest.raises(UserError, match=rf"(?s)line 1.*{message}"):
        read(tmp_path)


@dataclass(frozen=True)
class RoundingPlan(NativePlan):
    """Products round their activations, as a GPU's do."""

    def entry(self, op: Op[Any], key: str = "") -> Any:
        return {FUSED_MOE: rounding_experts, QUANTIZED_LINEAR: rounding_linear}.get(op, op.reference)


def rounded(x: torch.Tensor, weight: LinearWeight | ExpertWeights) -> torch.Tensor:
    assert weight.scheme is not None and weight.input_scale is not None
    return round_activation(x, weight.scheme, weight.input_scale.max())


def rounding_linear(weight: LinearWeight, arch: object, configs: object) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return F.linear(rounded(x, weight), weight.dequantized(), bias).to(out_dtype or x.dtype)

    return run


def rounding_experts(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation = SILU,
    *rest: object,
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        y = x[token]
        for weights in (w13, w2):
            y = gated(y, activation) if weights is w2 else y
            y = F.linear(rounded(y, weights), weights.dequantized(expert))
        out.index_add_(0, token, y * topk_weights[token, choice, None])
    return out


def make_loud(folder: Path) -> None:
    """Norms before the projections that amplify, and weights that make up for it: the same function."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensors[name] = tensor * LOUD
        elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate"):
            tensors[name] = tensor / LOUD
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def logits(folder: Path, tokens: list[int], plan_class: type[NativePlan]) -> torch.Tensor:
    plan = plan_for(folder)
    (found,) = TinyRunner(plan_class(plan.model, kv_cache_dtype=plan.kv_cache_dtype)).extend({1: tokens})
    return found


@pytest.mark.parametrize(("scheme", "largest_input"), [("nvfp4", 448 * 6), ("fp8_tensor", 448)])
def test_calibrated_checkpoints_are_nearer(
    model: Path, tmp_path: Path, scheme: str, largest_input: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source, default = tmp_path / "source", tmp_path / "default.json"
    save_tiny("qwen3_moe_wide", source)
    save_tokenizer(source)
    make_loud(source)
    file = write_prompts(tmp_path / "prompts.txt", [random_tokens(40, seed) for seed in range(4)])
    tokens = random_tokens(30, seed=9)  # not those of the prompts
    want = logits(source, tokens, NativePlan)
    torch.testing.assert_close(want, logits(model, tokens, NativePlan), rtol=0.0, atol=1e-2)
    largest = calibrate(str(source), file, 16384, "cpu").largest
    default.write_text(json.dumps(dict.fromkeys(largest, UNCALIBRATED_INPUT_SCALE)))
    static = ["--static-activations"] if scheme == "fp8_tensor" else []

    def export(name: str, *options: str) -> Path:
        target = tmp_path / name
        assert main(["--model", str(source), "--scheme", scheme, "--output", str(target), *options, *static]) == 0
        return target

    def error(folder: Path, plan_class: type[NativePlan] = RoundingPlan) -> float:
        return ((logits(folder, tokens, plan_class) - want).norm() / want.norm()).item()

    by_default = export("default", "--input-scales", str(default))
    measured = export("measured", "--calibrate", file, "--calibration-device", "cpu")
    assert "160 tokens of 4 prompts\n" in capsys.readouterr().out
    of_weights = error(measured, NativePlan)
    assert error(measured) < 1.3 * of_weights
    assert error(by_default) > 2.0 * of_weights
    factors = {n: t for n, t in load_file(measured / "model.safetensors").items() if n.endswith(".input_scale")}
    assert len(factors) == LAYERS * (4 + EXPERTS * 3)
    for name, factor in factors.items():
        assert factor.item() == pytest.approx(largest[name.removesuffix(".input_scale")] / largest_input, 1e-6), name


def test_the_summary_says_what_was_not_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model), "--scheme", "nvfp4", "--include", "*.experts.*", "--output"]
    assert main([*arguments, str(tmp_path / "default")]) == 0
    assert f"{LAYERS * EXPERTS * 3} activation factors are the default" in capsys.readouterr().out
    file = write_prompts(tmp_path / "prompts.txt", [[5]])
    assert main([*arguments, str(tmp_path / "out"), "--calibrate", file, "--calibration-device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"1 tokens of 1 prompts; no token reached {LAYERS * 2 * 3} modules of experts" in said
    assert "are the default" not in said


def test_activations_that_overflow(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    save_tiny("qwen3_moe_wide", source)
    save_tokenizer(source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0] = 3e38
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    file = write_prompts(tmp_path / "prompts.txt", [[5, 6]])
    arguments = ["--model", str(source), "--scheme", "nvfp4", "--output", str(tmp_path / "out"), "--calibrate", file]
    assert main([*arguments, "--calibration-device", "cpu"]) == 2
    assert "activations before layers.1.attn.o.weight are not finite" in capsys.readouterr().err


def test_models_that_do_not_fit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_setup, "free_memory_bytes", lambda index, unified: 1 << 20)
    with pytest.raises(UserError, match="--calibrate runs the unquantized model .* and cannot: the weights take"):
        calibrate(str(model), write_prompts(tmp_path / "prompts.txt", [[5]]), 10, "cpu")


def test_static_scales_must_be_whole(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({"model.layers.0.self_attn.o_proj": 1}))
    arguments = ["--model", str(model), "--scheme", "fp8_tensor", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--static-activations"]) == 2
    assert "needs --calibrate" in capsys.readouterr().err
    assert main([*arguments, "--static-activations", "--input-scales", str(scales)]) == 2
    assert "no scale was measured of model.layers.0.mlp.experts.0.down_proj" in capsys.readouterr().err
    assert main([*arguments, "--static-activations", "--input-scales", str(scales), "--include", "*.0.*.o_proj"]) == 0
    assert load_file(tmp_path / "out/model.safetensors")["model.layers.0.self_attn.o_proj.input_scale"].item() == 1.0
