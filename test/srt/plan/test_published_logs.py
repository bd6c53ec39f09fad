"""The memory plan beside what servers of these models reported on eight RTX PRO 6000.

See benchmark/results/card.md#the-memory-plan-beside-published-logs. The logs are SGLang 0.5.8's: sizes in GiB to two
digits, weights as the fall of the GPU's free memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.quantization import detect
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription, describe_model
from sglang.srt.plan.pool_sizes import CacheCost, cache_cost
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weights import rank_weight_bytes
from srt.plan.caching_allocator import Block, CachingAllocator

GIB = 1024**3
CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
AVAILABLE, FRACTION = 94.13, 0.848


def described(name: str) -> tuple[ModelDescription, dict[str, Any]]:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return describe_model(config, detect(config, CONFIGS)), config


def cost_of(model: ModelDescription, kv_dtype: str) -> CacheCost:
    return cache_cost(cache_groups(model, ParallelConfig("bfloat16", kv_dtype, 1, RankLayout(8))))


def vision_bytes(vision: dict[str, int], text_hidden: int) -> int:
    """Of Kimi K2.5's tower and projector, which every rank holds: attention and MLP with biases, two norms a layer,
    patches and positions; two matrices over 2 x 2 merged patches."""
    hidden, inter = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inter + inter + hidden + 4 * hidden
    patches = 3 * vision["patch_size"] ** 2 * hidden + hidden
    positions = vision["init_pos_emb_height"] * vision["init_pos_emb_width"] * hidden
    merged = 4 * hidden
    projector = merged * merged + merged + merged * text_hidden + text_hidden + 2 * hidden
    return 2 * (vision["vt_num_hidden_layers"] * layer + patches + positions + 2 * hidden + projector)


def test_glm47() -> None:
    model, _ = described("glm47")
    weights = rank_weight_bytes(rank_weights(model, RankLayout(8)), "bfloat16") / GIB
    assert weights == pytest.approx(41.90, rel=0.01)
    cost = cost_of(model, "bfloat16")
    assert cost.tokens_in(int(37.92 * GIB)) == pytest.approx(864_247, rel=0.001)
    assert cost.tokens_in(int((AVAILABLE * FRACTION - weights) * GIB)) == pytest.approx(864_247, rel=0.02)


def test_kimi_k25() -> None:
    model, config = described("kimi_k25")
    weights = rank_weight_bytes(rank_weights(model, RankLayout(8)), "bfloat16")
    with_vision = weights + vision_bytes(config["vision_config"], model.hidden_size)
    assert with_vision / GIB == pytest.approx(72.33, rel=0.01)
    assert cost_of(model, "bfloat16").tokens_in(int(0.30 * GIB)) == pytest.approx(4_578, rel=0.002)


def held_with_nvfp4_experts(config: dict[str, Any], tp_size: int) -> int:
    """What 0.5.8's process holds for K2 Thinking's weights: it makes the experts' scales twice, the second time in the
    order that its kernels read, and frees the first when everything is loaded. The smaller of them then is half of a
    segment whose other half holds the next layer's projections."""
    memory = CachingAllocator()
    hidden, experts, layers = config["hidden_size"], config["n_routed_experts"], config["num_hidden_layers"]
    heads, inter = config["num_attention_heads"] // tp_size, config["moe_intermediate_size"] // tp_size
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]

    def dense(rows: int, cols: int) -> None:
        memory.allocate(rows * cols * 2)

    def quantized(rows: int, cols: int) -> None:
        memory.allocate(rows * cols // 2)
        memory.allocate(rows * cols // 16)

    def scales(size: int) -> Block:
        first = memory.allocate(size)
        padded = memory.allocate(size)
        memory.allocate(size)
        memory.free(padded)
        return first

    loaded: list[tuple[Block, int]] = []
    dense(config["vocab_size"] // tp_size, hidden)
    memory.allocate(config["max_position_embeddings"] * rope * 4)
    for layer in range(layers):
        dense(q_rank + kv_rank + rope, hidden)
        dense(heads * (nope + rope), q_rank)
        dense(heads * (nope + value), kv_rank)
        dense(hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            size = config["intermediate_size"] // tp_size
        else:
            size = inter
            dense(experts, hidden)
            memory.allocate(experts * 2 * inter * hidden // 2)
            memory.allocate(experts * hidden * inter // 2)
            for count in (experts * 2 * inter * hidden // 16, experts * hidden * inter // 16):
                loaded.append((scales(count), count))
        quantized(2 * size, hidden)
        quantized(hidden, size)
    dense(config["vocab_size"] // tp_size, hidden)
    for _ in range(layers):
        dense(heads * nope, kv_rank)
        dense(heads * value, kv_rank)
    for first, size in loaded:
        memory.free(memory.allocate(size), memory.allocate(size), first)
    return memory.held()


def test_kimi_k2_thinking() -> None:
    model, config = described("kimi_k2_thinking")
    held = held_with_nvfp4_experts(config, 8)
    assert held / GIB == pytest.approx(73.87, rel=0.01)
    halves = 60 * 384 * 7168 * 256 // 16
    assert held - halves == pytest.approx(
        rank_weight_bytes(rank_weights(model, RankLayout(8)), "bfloat16"), rel=0.01
    ), "the rest is parameters"


def test_kimi_k2_thinking_has_the_tokens_that_its_weights_leave() -> None:
    model, _ = described("kimi_k2_thinking")
    cost = cost_of(model, "fp8_e4m3")
    assert cost.tokens_in(int(5.90 * GIB)) == pytest.approx(180_191, rel=0.002)
    assert cost.tokens_in(int((AVAILABLE * FRACTION - 73.87) * GIB)) == pytest.approx(180_191, rel=0.02)
