"""Which steps run as two halves: from the flags, the links, the layout and what computes attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import MIB
from sglang.srt.kernels.spec import PeerLinks
from sglang.srt.managers.scheduler import scheduler_setup
from sglang.srt.plan.model_planner import parallel_config_of
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs
from srt.models.harness import save_tiny

ARCH = arch_by_name("rtx-pro-6000-server")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "norms behind blocks": ("gemma3", {}),
    "wide heads": ("qwen3", {"head_dim": 64}),
    "long heads": ("qwen3", {"head_dim": 128}),
    "experts": ("qwen3_moe", {}),
    "latents": ("deepseek_v3", {}),
    "expanded latents": (
        "deepseek_v3",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    ),
    "wide latents": ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in directories.items():
        save_tiny(MODELS[name][0], folder, **MODELS[name][1])
    return directories


def plan_of(
    folder: Path, links: Topology | None = Topology.HOST_BRIDGE, packages: tuple[str, ...] = ("triton",), **flags: Any
) -> Plan:
    args = ServerArgs.from_kwargs(model_path=str(folder), **{"tp_size": 2, **flags})
    peers = None if links is None else PeerLinks(links)
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, ARCH, 40 << 30, frozenset(packages), links=peers)


@pytest.mark.parametrize(
    ("name", "links", "flags", "least"),
    [
        ("dense", Topology.HOST_BRIDGE, {}, 2048),
        ("dense", Topology.CROSS_NUMA, {}, 2048),
        ("norms behind blocks", Topology.HOST_BRIDGE, {}, 4096),
        ("experts", Topology.SWITCH, {}, 8192),
        ("experts", Topology.SWITCH, {"enable_quantized_all_reduce": "prefill"}, None),
        ("experts", Topology.SWITCH, {"enable_quantized_all_reduce": "all", "enable_two_batch_overlap": True}, 8192),
        ("dense", Topology.NVLINK, {}, None),
        ("dense", Topology.NVLINK, {"enable_two_batch_overlap": True}, 4096),
        ("dense", Topology.HOST_BRIDGE, {"two_batch_overlap_min_tokens": 300}, 300),
        ("dense", Topology.HOST_BRIDGE, {"disable_two_batch_overlap": True}, None),
        ("dense", Topology.HOST_BRIDGE, {"tp_size": 1}, None),
        ("dense", None, {}, None),
        ("dense", Topology.HOST_BRIDGE, {"attn_dp_size": 2}, None),
        ("dense", Topology.HOST_BRIDGE, {"attn_dp_size": 2, "enable_two_batch_overlap": True}, 4096),
        ("latents", Topology.HOST_BRIDGE, {"dcp_size": 2}, None),
    ],
)
def test_the_plan_decides(
    name: str, links: Topology | None, flags: dict[str, Any], least: int | None, folders: dict[str, Path]
) -> None:
    plan = plan_of(folders[name], links, **flags)
    assert (plan.two_batch_overlap and plan.two_batch_overlap.min_tokens) == least
    assert least is None or (plan.two_batch_overlap is not None and plan.two_batch_overlap.exact), (
        "two ranks hide sums as they are"
    )
    assert ("two_batch_overlap" in plan.describe()) == (least is not None)
    assert least is None or f"{least:,} tokens" in plan.describe()["two_batch_overlap"]


@pytest.mark.parametrize("forbidden", ["1", "0"])
def test_gpus_with_nvlink_compute_halves_where_sums_pass_main_memory(
    forbidden: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", forbidden)
    monkeypatch.setattr(scheduler_setup, "pci_address", lambda device: None)
    monkeypatch.setattr(scheduler_setup, "gpus_reach_one_another", lambda devices: True)
    seen = scheduler_setup.with_library_topology(PeerLinks(Topology.NVLINK, "--disable-custom-all-reduce"), (0, 1))
    assert seen.topology is Topology.NVLINK
    args = ServerArgs.from_kwargs(
        model_path=str(folders["dense"]), tp_size=2, enable_quantized_all_reduce="prefill", disable_cuda_graph=True
    )
    plan = make_plan(args, ModelConfig.from_server_args(args), ARCH, 40 << 30, links=seen)
    assert plan.quantized_sums is not None and (plan.two_batch_overlap is None) == (forbidden == "0")
    assert plan.quantized_sums.least_bytes == (32 if forbidden == "0" else 16) * MIB


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("dense", {"tp_size": 1}, "of which there is one"),
        ("dense", {"tp_size": 1, "pp_size": 2}, "of which there is one"),
        ("dense", {"tp_size": 1, "dp_size": 2}, "of which there is one"),
        ("latents", {"dcp_size": 2}, "--dcp-size"),
        ("dense", {"disable_two_batch_overlap": True}, "contradict"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    name: str, flags: dict[str, Any], says: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=says):
        plan_of(folders[name], enable_two_batch_overlap=True, **flags)


FLASHINFER: dict[str, Any] = {"packages": ("triton", "flashinfer"), "dtype": "bfloat16"}


def test_flashinfers_attention_of_latents_computes_whole_steps(folders: dict[str, Path]) -> None:
    flags = FLASHINFER | {"attention_backend": "flashinfer"}
    assert plan_of(folders["wide latents"], **flags).two_batch_overlap is None
    with pytest.raises(UserError, match="keeps one plan"):
        plan_of(folders["wide latents"], enable_two_batch_overlap=True, **flags)


def test_flashinfers_other_attention_computes_halves(folders: dict[str, Path]) -> None:
    asked = plan_of(folders["wide heads"], attention_backend="flashinfer", **FLASHINFER)
    assert asked.two_batch_overlap is not None and asked.choices["extend_attention"].name == "flashinfer"
    long = plan_of(folders["long heads"], **FLASHINFER)
    assert long.two_batch_overlap is not None and long.choices["long_prompt_attention"].name == "flashinfer"
    latents = plan_of(folders["expanded latents"], **FLASHINFER)
    assert latents.two_batch_overlap is not None and latents.choices["long_latent_prompt"].name == "flashinfer"


@pytest.mark.parametrize(
    ("flags", "mode"),
    [({}, "auto"), ({"enable_two_batch_overlap": True}, "on"), ({"disable_two_batch_overlap": True}, "off")],
)
def test_predictions_hear_of_the_flags(flags: dict[str, Any], mode: str, folders: dict[str, Path]) -> None:
    args = ServerArgs.from_kwargs(model_path=str(folders["dense"]), tp_size=2, **flags)
    description = plan_of(folders["dense"], **flags).description
    assert parallel_config_of(args, "bfloat16", description).two_batch == mode
