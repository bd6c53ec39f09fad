#!/bin/sh
# Numerics of MXFP4 experts on this GPU, then times of GPT-OSS's layer with the tiles of the tree and with the best ones.
#   sh lab/kernels/fused_moe_triton/tune_gpt_oss.sh OUT [numbers of tokens]
# About two minutes with 16 processors. Tuning files are written under OUT/configs.
set -e
mkdir -p "$1"; out=$(cd "$1" && pwd); shift
sizes=${*:-1 4 16 64 256 1024 8192}
here=$(cd "$(dirname "$0")" && pwd); root=$here/../../..
mkdir -p "$out/model"
cat > "$out/model/config.json" <<'J'
{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
 "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_attention_heads": 64,
 "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128, "swiglu_limit": 7.0,
 "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-05, "rope_theta": 150000,
 "max_position_embeddings": 131072, "attention_bias": true, "hidden_act": "silu", "tie_word_embeddings": false,
 "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                  "rope_type": "yarn", "truncate": false},
 "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
                         "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}
J
PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
(cd "$root" && python -m pytest -q -n 0 -p no:cacheprovider test/srt/layers/moe/test_fused_moe.py -k "mxfp4 and not mxfp8" 2>&1 | tail -3)
tuner="python $root/benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton.py --model $out/model --batch-size $sizes"
echo "--- tiles of the tree"
$tuner
echo "--- the best tiles"
$tuner --tune --processes 16 --output-dir "$out/configs" 2>/dev/null
SGLANG_MOE_CONFIG_DIR=$out $tuner
echo "--- few tokens"
(cd "$here" && python bench_pair_tiles.py 32,2880,2880,4,mxfp4)
