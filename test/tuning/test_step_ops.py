"""Which ops a step of a model is predicted of: what steps beside the usual ones have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from srt.kernels.published import configs

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.conditions import SKINNY_MAX_ROWS, SKINNY_MIN_N
from sglang.srt.layers.attention import sites
from sglang.srt.models.causal_lm import BLOCKS
from sglang.srt.plan.defaults import cuda_graph_prefill_tokens
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription, describe_model
from sglang.srt.plan.ranks import RankLayout
from sglang.tuning.attention_model import Prompt
from sglang.tuning.mixer_ops import LONG_PROMPTS, mixer_ops
from sglang.tuning.ops import AllGather, AllReduce, Elementwise, ExtendAttention, Linear, Op
from sglang.tuning.predicted_times import predicted
from sglang.tuning.step import Step, decode_step, prefill_step
from sglang.tuning.steps import FROM_HOST, ops_of, time_step, total

CARD, GEFORCE = arch_by_name("rtx-pro-6000-server"), arch_by_name("rtx-5090")
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def model_of(name: str) -> ModelDescription:
    return describe_model(configs()[name], None, False)


def named(model: ModelDescription, parallel: ParallelConfig, step: Step) -> dict[str, list[Op]]:
    ops: dict[str, list[Op]] = {}
    for name, op in ops_of(model, parallel, step):
        ops.setdefault(name, []).append(op)
    return ops


def test_every_mixer_has_predicted_times() -> None:
    mixers = [kind for kind in BLOCKS if hasattr(kind, "attention_shape")]
    missing = [kind.__name__ for kind in mixers if mixer_ops.dispatch(kind) is mixer_ops.dispatch(object)]
    assert not missing, f"register a function that yields their ops in sglang/tuning/mixer_ops.py: {missing}"


def test_long_prompts_are_those_of_a_server() -> None:
    assert LONG_PROMPTS == sites.LONG_PROMPTS


@pytest.mark.parametrize("card", [CARD, GEFORCE], ids=["server", "5090"])
def test_a_library_computes_long_prompts_where_it_is_chosen(card: ArchTraits) -> None:
    model, parallel = model_of("Qwen3-8B"), ParallelConfig("bfloat16", "bfloat16")
    chosen = replace(parallel, library_prompts=True)
    assert "long_prompt_attention" not in named(model, parallel, prefill_step(8192))
    assert "extend_attention" in named(model, chosen, prefill_step(LONG_PROMPTS - 1))
    layers = named(model, chosen, prefill_step(LONG_PROMPTS))
    assert len(layers["long_prompt_attention"]) == len(model.layers) and "extend_attention" not in layers
    by_triton, by_library = (
        total(time_step(model, each, prefill_step(8192), card)).seconds for each in (parallel, chosen)
    )
    assert by_library < by_triton
    assert named(model, chosen, decode_step(4)).keys() == named(model, parallel, decode_step(4)).keys()


def test_a_library_computes_long_prompts_over_latents_where_it_is_chosen() -> None:
    model, parallel = model_of("deepseek_v3"), ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(16))
    chosen = replace(parallel, library_latents=True)
    assert "long_latent_prompt" not in named(model, parallel, prefill_step(8192))
    assert "extend_attention" in named(model, chosen, prefill_step(LONG_PROMPTS - 1))
    layers = named(model, chosen, prefill_step(8192))
    assert len(layers["long_latent_prompt"]) == len(model.layers) and "extend_attention" not in layers
    measured = predicted(layers["long_latent_prompt"][0], CARD)
    assert measured is not None and measured.seconds == pytest.approx(549e-6, rel=0.03)
    (by_triton,) = {predicted(op, CARD) for op in named(model, parallel, prefill_step(8192))["extend_attention"]}
    assert by_triton is not None and by_triton.seconds > 1.8 * measured.seconds
    assert named(model, chosen, decode_step(4)).keys() == named(model, parallel, decode_step(4)).keys()


def test_layers_in_windows_and_narrow_heads_keep_their_kernel() -> None:
    """Gemma 3 has one layer in six that attends to all tokens; heads of GPT-OSS have 64 dims."""
    parallel = ParallelConfig("bfloat16", "bfloat16", library_prompts=True)
    gemma = named(model_of("Gemma-3-27B"), parallel, prefill_step(8192))
    assert len(gemma["extend_attention in a window"]) > 4 * len(gemma["long_prompt_attention"]) > 0
    assert "long_prompt_attention" not in named(model_of("gpt_oss"), parallel, prefill_step(8192))


def test_a_prefix_takes_a_library_the_time_of_its_keys() -> None:
    """No prompt behind a prefix was timed with it."""

    def seconds(prefix: int) -> float:
        time = predicted(ExtendAttention(Prompt(1, 4096, 32, 8, 128, 128, prefix, 0, 2), library=True), CARD)
        assert time is not None
        return time.seconds

    # 4,096 tokens see 2,048 of each other on average, and all 8,192 before them.
    assert 3.5 < seconds(8192) / seconds(0) < 6.5


@pytest.mark.parametrize(("name", "layers"), [("MiniMax-M2.5", 62)])
def test_norms_of_whole_rows_are_summed_over_ranks(name: str, layers: int) -> None:
    model = model_of(name)
    for tokens in (1, 64):
        one, four = (
            named(model, ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(tp)), decode_step(tokens))
            for tp in (1, 4)
        )
        assert "all_reduce of norms" not in one and len(one["qk_whole_norm"]) == layers
        assert four["all_reduce of norms"] == [AllReduce(8 * tokens, 4)] * layers


@pytest.mark.parametrize("tp_size", [1, 4])
def test_rows_of_n_grams_are_read_once_for_a_token(tp_size: int) -> None:
    """As many rows as a token's n-grams have, of all ranks together; each rank gathers them all."""
    model = model_of("DeepSeek-V4.1-Flash")
    tables = [layer.ngrams for layer in model.layers if layer.ngrams.weights(8, ParallelConfig("", "").ranks, 1)]
    assert tables
    ops = named(model, ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(tp_size)), decode_step(16))
    assert len(ops["ngram_embedding"]) == len(tables)
    for op, table in zip(ops["ngram_embedding"], tables, strict=True):
        assert isinstance(op, Elementwise)
        rows = 16 * table.num_heads / tp_size  # type: ignore[union-attr]
        row = op.size / rows / (FROM_HOST if table.on_host else 1)  # type: ignore[union-attr]
        assert table.dim / 2 <= row < 2 * table.dim + 64 and row % 32 == 0  # type: ignore[union-attr]
    gathered = ops.get("all_gather of n-grams", [])
    assert len(gathered) == (len(tables) if tp_size > 1 else 0) and all(isinstance(op, AllGather) for op in gathered)


def test_few_rows_of_16_bits_are_read_once() -> None:
    """The kernels of one row, of up to 16, and cuBLAS: times grow with the rows, and by little up to 16."""

    def seconds(tokens: int, rows: int = 6144) -> tuple[float, str]:
        time = predicted(Linear(tokens, rows, 4096), CARD)
        assert time is not None
        return time.seconds, time.how

    one, most = seconds(1), seconds(SKINNY_MAX_ROWS)
    assert one[0] < most[0] < 1.15 * one[0]
    assert seconds(2)[1] == most[1] != one[1]
    assert seconds(SKINNY_MAX_ROWS + 1)[1] != most[1] != seconds(4, SKINNY_MIN_N - 16)[1]


@pytest.mark.parametrize(
    ("step", "tokens", "full", "window"),
    [
        (decode_step(4, 8192), 4, 1024, 512),
        (decode_step(4, 300), 4, 300, 300),
        (prefill_step(2048), 2048, 1024, 512),
    ],
)
def test_biases_by_distance_are_made_and_read(step: Step, tokens: int, full: int, window: int) -> None:
    """Of every head in 16 bits; of distances at which there is a key. Inkling's windows have half as many."""
    model, seen = model_of("Inkling-Small"), {0: full, 512: window}
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GQA)]
    wanted = [
        2.0 * tokens * mixer.num_heads // 2 * (mixer.softmax.relative_bias.elements + seen[mixer.window])
        for mixer in mixers
    ]
    got = named(model, ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(2)), step)["attention_biases"]
    assert [op.num_bytes for op in got] == wanted and len(got) == len(model.layers)


@pytest.mark.parametrize(("name", "tokens"), [("Qwen3-8B", 640), ("Meta-Llama-3.1-70B", 128)])
def test_prefill_graphs_end_where_a_slow_host_keeps_up(name: str, tokens: int, tmp_path: Path) -> None:
    """It was measured to take 0.83 ms to launch a dense layer in FP8."""
    config = {**configs()[name], "quantization_config": FP8_BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = describe_model(config, quantization_of(config, tmp_path, None, "default"), source=name)
    largest = cuda_graph_prefill_tokens(model, 1, 8192)[-1]
    time = total(time_step(model, ParallelConfig("bfloat16", "bfloat16"), prefill_step(largest), CARD))
    assert largest == tokens and time.seconds / len(model.layers) == pytest.approx(0.83e-3, rel=0.3)
