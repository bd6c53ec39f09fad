"""What the tensors of a GGUF file are called in checkpoints of the model, and what its converter changed. No torch.

A row says which modules a tensor becomes and how its values are changed back. Names end in `.weight` or `.bias` on both
sides unless a row says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint. `{layer}` in the name is the number of the layer. `{expert}` is that of
    the expert, of a tensor that holds all of them.

    change: what is done to the values, a key of `CHANGES` in `model_loader/gguf_changes.py`; "" for nothing
    sources: the tensors it is made of, if they are several
    whole: the name is that of a tensor, without `.weight`

    Without a name it is a tensor of which the config says everything.
    """

    name: str
    change: str = ""
    sources: tuple[str, ...] = ()
    whole: bool = False


_LAYER = "model.layers.{layer}."


def _layer(name: str, change: str = "", **facts: object) -> Target:
    return Target(_LAYER + name, change, **facts)  # type: ignore[arg-type]


MODEL: Mapping[str, Target] = {
    "token_embd": Target("model.embed_tokens"),
    "output_norm": Target("model.norm"),
    "output": Target("lm_head"),
}
ATTENTION: Mapping[str, Target] = {
    "attn_norm": _layer("input_layernorm"),
    "attn_q": _layer("self_attn.q_proj"),
    "attn_k": _layer("self_attn.k_proj"),
    "attn_v": _layer("self_attn.v_proj"),
    "attn_output": _layer("self_attn.o_proj"),
    "ffn_norm": _layer("post_attention_layernorm"),
}
QK_NORMS: Mapping[str, Target] = {
    "attn_q_norm": _layer("self_attn.q_norm"),
    "attn_k_norm": _layer("self_attn.k_norm"),
}
MLP: Mapping[str, Target] = {
    "ffn_gate": _layer("mlp.gate_proj"),
    "ffn_up": _layer("mlp.up_proj"),
    "ffn_down": _layer("mlp.down_proj"),
}
EXPERTS: Mapping[str, Target] = {
    "ffn_gate_inp": _layer("mlp.gate"),
    "ffn_gate_exps": _layer("mlp.experts.{expert}.gate_proj"),
    "ffn_up_exps": _layer("mlp.experts.{expert}.up_proj"),
    "ffn_down_exps": _layer("mlp.experts.{expert}.down_proj"),
}
LLAMA: Mapping[str, Target] = {
    **MODEL,
    **ATTENTION,
    **MLP,
    "attn_q": _layer("self_attn.q_proj", "pairs_to_halves"),
    "attn_k": _layer("self_attn.k_proj", "pairs_to_halves_kv"),
    "ffn_gate_inp": _layer("block_sparse_moe.gate"),  # Mixtral's
    "ffn_gate_exps": _layer("block_sparse_moe.experts.{expert}.w1"),
    "ffn_up_exps": _layer("block_sparse_moe.experts.{expert}.w3"),
    "ffn_down_exps": _layer("block_sparse_moe.experts.{expert}.w2"),
    "rope_freqs": Target(""),
    "attn_rot_embd": Target(""),
}
QWEN2: Mapping[str, Target] = {**MODEL, **ATTENTION, **MLP}
QWEN3: Mapping[str, Target] = {**QWEN2, **QK_NORMS}
QWEN2_MOE: Mapping[str, Target] = {
    **MODEL,
    **ATTENTION,
    **EXPERTS,
    "ffn_gate_inp_shexp": _layer("mlp.shared_expert_gate", "as_row"),
    "ffn_gate_shexp": _layer("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": _layer("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": _layer("mlp.shared_expert.down_proj"),
}
QWEN3_MOE: Mapping[str, Target] = {**MODEL, **ATTENTION, **QK_NORMS, **EXPERTS}
GEMMA3: Mapping[str, Target] = {
    **MODEL,
    **ATTENTION,
    **MLP,
    "output_norm": Target("model.norm", "minus_one"),
    "attn_norm": _layer("input_layernorm", "minus_one"),
    "attn_q_norm": _layer("self_attn.q_norm", "minus_one"),
    "attn_k_norm": _layer("self_attn.k_norm", "minus_one"),
    "post_attention_norm": _layer("post_attention_layernorm", "minus_one"),
    "ffn_norm": _layer("pre_feedforward_layernorm", "minus_one"),
    "post_ffw_norm": _layer("post_feedforward_layernorm", "minus_one"),
}
GLM4: Mapping[str, Target] = {
    **MODEL,
    **ATTENTION,
    "post_attention_norm": _layer("post_self_attn_layernorm"),
    "post_ffw_norm": _layer("post_mlp_layernorm"),
    "ffn_up": _layer("mlp.gate_up_proj"),  # gate's rows, then up's
    "ffn_down": _layer("mlp.down_proj"),
}
GPT_OSS: Mapping[str, Target] = {
    **MODEL,
    **ATTENTION,
    "post_attention_norm": _layer("post_attention_layernorm"),
    "attn_sinks": _layer("self_attn.sinks", whole=True),
    "ffn_gate_inp": _layer("mlp.router"),
    "ffn_gate_exps": _layer(
        "mlp.experts.gate_up_proj", "alternating_rows", sources=("ffn_gate_exps", "ffn_up_exps"), whole=True
    ),
    "ffn_down_exps": _layer("mlp.experts.down_proj", whole=True),
}
DEEPSEEK2: Mapping[str, Target] = {
    **MODEL,
    **ATTENTION,
    **MLP,
    **EXPERTS,
    "attn_q_a": _layer("self_attn.q_a_proj"),
    "attn_q_a_norm": _layer("self_attn.q_a_layernorm"),
    "attn_q_b": _layer("self_attn.q_b_proj"),
    "attn_kv_a_mqa": _layer("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": _layer("self_attn.kv_a_layernorm"),
    "attn_kv_b": _layer("self_attn.kv_b_proj"),
    "attn_k_b": _layer("self_attn.kv_b_proj", "joined_kv_b", sources=("attn_k_b", "attn_v_b")),
    "ffn_gate_shexp": _layer("mlp.shared_experts.gate_proj"),
    "ffn_up_shexp": _layer("mlp.shared_experts.up_proj"),
    "ffn_down_shexp": _layer("mlp.shared_experts.down_proj"),
    "exp_probs_b": _layer("mlp.gate.e_score_correction_bias", whole=True),
}
