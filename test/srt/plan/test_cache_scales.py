"""Scales of the KV cache in a file: what is read, what is refused, and where they reach."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.mem_cache.storage.fingerprint import fingerprint
from sglang.srt.plan.cache_scales import LayerScales, read_cache_scales
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs
from srt.models.harness import TinyRunner, plan_for, save_tiny

ARCH = arch_by_name("rtx-pro-6000-server")
OF_SGLANG: dict[str, Any] = {
    "model_type": "qwen3",
    "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.25, "2": 2}}},
}


def written(folder: Path, content: Any) -> str:
    file = folder / "scales.json"
    file.write_text(json.dumps(content))
    return str(file)


def with_cache(**changes: Any) -> dict[str, Any]:
    content = copy.deepcopy(OF_SGLANG)
    content["kv_cache"] |= changes
    return content


def read(folder: Path, content: Any) -> dict[int, LayerScales]:
    return dict(read_cache_scales(written(folder, content), {"qwen3"}).layers)


def test_the_forms_of_a_file(tmp_path: Path) -> None:
    same = {0: LayerScales(0.5, 0.5), 1: LayerScales(0.25, 0.25), 2: LayerScales(2.0, 2.0)}
    assert read(tmp_path, OF_SGLANG) == same
    ranks = {"0": {"0": 0.5, "1": 0.125, "2": 1}, "1": {"0": 0.25, "1": 0.25, "2": 2}}
    assert read(tmp_path, with_cache(scaling_factor=ranks)) == same, "ranks share the largest"
    apart = with_cache(k_scale={"0": [0.1, 0.3], "1": 0.2}, v_scale={"0": 0.4})
    assert read(tmp_path, apart) == same | {0: LayerScales(0.3, 0.4), 1: LayerScales(0.2, 0.25)}
    alone = with_cache(k_scale={"0": 1}, v_scale={"0": 2})
    del alone["kv_cache"]["scaling_factor"]
    assert read(tmp_path, alone) == {0: LayerScales(1.0, 2.0)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must hold a JSON object"),
        (OF_SGLANG | {"model_type": "llama"}, r"is for 'llama', and the model is qwen3\. python -m"),
        ({"model_type": "qwen3"}, "'kv_cache' must be an object; got None"),
        (with_cache(dtype="int8"), "'dtype' must be float8_e4m3fn; got 'int8'"),
        (with_cache(scaling_factor=[1.0]), r"'scaling_factor' must be an object; got \[1\.0\]"),
        (with_cache(scaling_factor={"a": {}}), "'scaling_factor' must have whole numbers as keys; got 'a'"),
        (with_cache(scaling_factor={"0": 1.0}), "of rank 0 must be an object; got 1.0"),
        (with_cache(scaling_factor={}), "has no scales"),
        (with_cache(scaling_factor={"0": {"0": 1}, "1": {"1": 1}}), "does not have the same layers for each rank"),
        (with_cache(scaling_factor={"0": {"0": 0}}), "of rank 0 of layer 0 must be a positive number; got 0"),
        (with_cache(scaling_factor={"0": {"0": float("nan")}}), "must be a positive number; got nan"),
        (with_cache(scaling_factor={"0": {"0": float("inf")}}), "must be a positive number; got inf"),
        (with_cache(scaling_factor={"0": {"0": True}}), "must be a positive number; got True"),
        (with_cache(k_scale={"0": [0.5, -1.0]}), r"'k_scale' of layer 0 must be a positive number; got -1\.0"),
        (with_cache(v_scale={"0": []}), "'v_scale' of layer 0 is empty"),
        (with_cache(k_scale={"7": 1.0}), "'v_scale' lacks layer 7"),
        (OF_SGLANG | {"model_type": ["qwen3"]}, r"'model_type' must be a text; got \['qwen3'\]"),
        (with_cache(k_scale={"0": 1e-50}), "of layer 0 must be from 1e-30 to 1e.30; got 1e-50"),
        (with_cache(k_scale={"0": 1e39}), "of layer 0 must be from 1e-30 to 1e.30; got 1e.39"),
        (with_cache(k_scale={"0": 10**400}), "of layer 0 must be from 1e-30 to 1e.30; got 1000"),
        (with_cache(k_scale={"9" * 5000: 1.0}), "must have whole numbers as keys; got '999"),
    ],
)
def test_what_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, content)


def plan(folder: Path, content: Any = OF_SGLANG, **flags: Any) -> Plan:
    file = None if content is None else written(folder, content)
    args = ServerArgs.from_kwargs(model_path=str(folder / "model"), quantization_param_path=file, **flags)
    return make_plan(args, ModelConfig.from_server_args(args), ARCH, 40 << 30, host_bytes=1 << 38)


def test_the_plan_has_the_scales(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    layers = ModelConfig.from_server_args(ServerArgs(model_path=str(tmp_path / "model"))).hf_config["num_hidden_layers"]
    scales = {str(layer): 0.5 for layer in range(layers)}
    content = with_cache(scaling_factor={"0": scales})
    in_eight = plan(tmp_path, content, kv_cache_dtype="fp8_e4m3")
    assert in_eight.cache_scales is not None and len(in_eight.cache_scales.layers) == layers
    assert in_eight.describe()["kv_cache_scales"].startswith(f"of {layers} layers, from ")
    in_16 = plan(tmp_path, content)
    assert in_16.cache_scales is None
    assert any("has no effect: the KV cache is in float32; add --kv-cache-dtype" in note for note in in_16.warnings)
    with pytest.raises(UserError, match=f"no scale of layer {layers - 1}. python -m sglang.quantize"):
        fewer = {layer: scale for layer, scale in scales.items() if int(layer) < layers - 1}
        plan(tmp_path, with_cache(scaling_factor={"0": fewer}), kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UserError, match=f"has scales of layer {layers}, and .* has {layers} layers"):
        more = scales | {str(layers): 1.0}
        plan(tmp_path, with_cache(scaling_factor={"0": more}), kv_cache_dtype="fp8_e4m3")


def test_stored_pages_of_other_scales_are_not_found(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    seen = set()
    for content in (None, OF_SGLANG, with_cache(scaling_factor={"0": {"0": 0.5, "1": 0.25, "2": 4}})):
        flags = {"kv_cache_dtype": "fp8_e4m3", "enable_hierarchical_cache": True}
        made = plan(tmp_path, content, **flags)
        args = ServerArgs.from_kwargs(model_path=str(tmp_path / "model"), **flags)
        seen.add(fingerprint(args, made, 0))
    assert len(seen) == 3


def test_layers_take_the_scales_of_the_file(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    scales = read_cache_scales(written(tmp_path, with_cache(v_scale={"1": 4})), {"qwen3"})
    planned = plan_for(tmp_path / "model", kv_cache_dtype="fp8_e4m3")
    runner = TinyRunner(replace(planned, cache_scales=scales))
    assert [(c.k_scale, c.v_scale) for c in runner.model.caches] == [(0.5, 0.5), (0.25, 4.0), (2.0, 2.0)]
