"""Ranks cut adapters of experts as they cut the experts: whole experts, or a share of their dims, whatever the layout
of the file. What an adapter of one layout has for all experts is what its other layouts have."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.configs.adapters.files import read_adapter_files
from sglang.srt.errors import UserError
from sglang.srt.layers.adapters import AdapterLayers
from sglang.srt.layers.expert_adapters import LayerExperts
from sglang.srt.layers.quantization.expert_sizes import ExpertSizes
from sglang.srt.layers.quantization.experts import _products, rows_of
from sglang.srt.plan.adapters import AdapterPlan, shares_outer
from sglang.srt.plan.weight_spec import Matrix
from srt.adapter_files import one_layer

EXPERTS, HIDDEN, DIMS, RANK = 5, 6, 8, 3
MODULE = "model.layers.0.mlp.experts"


MATRICES = (
    Matrix("moe.w13", ("gate", "up"), 2 * DIMS, HIDDEN, experts=EXPERTS),
    Matrix("moe.w2", ("down",), HIDDEN, DIMS, experts=EXPERTS),
)


def tensors_of(layout: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, rows, cols in (("gate_up_proj", 2 * DIMS, HIDDEN), ("down_proj", HIDDEN, DIMS)):
        a = torch.randn(EXPERTS, RANK, cols, generator=generator)
        b = torch.randn(EXPERTS, rows, RANK, generator=generator)
        inner = ".base_layer" if name == "gate_up_proj" else ""
        if layout == "flat":
            tensors[f"{MODULE}{inner}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{MODULE}{inner}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
        elif layout == "stacked":
            tensors |= {f"{MODULE}.{name}.lora_A": a, f"{MODULE}.{name}.lora_B": b}
        elif layout == "outer":
            down = name == "down_proj"
            tensors[f"{MODULE}.{name}.lora_A"] = a if down else a[:1]
            tensors[f"{MODULE}.{name}.lora_B"] = b[:1] if down else b
        else:
            of_parts = dict(zip(("w1", "w3"), b.chunk(2, 1), strict=True)) if name == "gate_up_proj" else {"w2": b}
            for part, b_part in of_parts.items():
                for e in range(EXPERTS):
                    tensors[f"{MODULE}.{e}.{part}.lora_A.weight"] = a[e]
                    tensors[f"{MODULE}.{e}.{part}.lora_B.weight"] = b_part[e]
    return {f"base_model.model.{name}": tensor.contiguous().clone() for name, tensor in tensors.items()}


def write(folder: Path, layout: str, tensors: dict[str, torch.Tensor] | None = None, **more: Any) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(tensors or tensors_of(layout), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_parameters": ["experts.gate_up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    return folder


def layers_of(
    ep: tuple[int, int] = (0, 1), tp: tuple[int, int] = (0, 1), shared_outer: bool = False, **more: Any
) -> Any:
    experts, dims = -(-EXPERTS // ep[1]), DIMS // tp[1]
    w13 = Matrix("moe.w13", ("gate", "up"), 2 * dims, HIDDEN, experts=experts)
    w2 = Matrix("moe.w2", ("down",), HIDDEN, dims, experts=experts)
    sizes = ExpertSizes(w13, w2, EXPERTS, DIMS, ep_rank=ep[0], ep_size=ep[1])
    model = one_layer(experts=True)
    weights = SimpleNamespace(model=model, layers=((w13, w2),))
    plan = SimpleNamespace(
        adapters=AdapterPlan(2, RANK, more.get("targets"), shared_outer), entry=lambda op: op.reference,
        weights=weights, description=model,
    )  # fmt: skip
    layers = AdapterLayers(plan, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    products = _products(sizes, None, SimpleNamespace(rank=tp[0]))  # type: ignore[arg-type]
    layer = LayerExperts(EXPERTS, sizes.local, sizes.padded_experts)
    experts = layers.experts(layer, [rows_of(product) for product in products], f"{MODULE}.0.gate_proj", {})
    assert experts is not None
    return layers


def deltas(layers: Any, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """B A of each expert of a rank, of gate and up [E, 2, dims, H] and of down [E, H, dims]."""
    adapter = layers.read(read_adapter_files(folder))
    assert adapter.ranks.flatten().tolist() == [RANK, RANK, 0, 0]  # those behind are for the embedding and the head
    (a, b), (down_a, down_b) = (adapter.matrices[number] for number in (0, 1))
    up = torch.einsum(
        "epdr,eprk->epdk", b.unflatten(1, (2, -1)).expand(len(b), -1, -1, -1), a.expand(len(b), -1, -1, -1)
    )
    return up, down_b.expand(len(down_a), -1, -1) @ down_a[:, 0]


@pytest.mark.parametrize("layout", ["each", "flat", "stacked", "outer"])
def test_ranks_together_have_all(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / "a", layout)
    up, down = deltas(layers_of(), folder)
    if layout != "outer":
        known = tensors_of("stacked")
        a, b = (known[f"base_model.model.{MODULE}.gate_up_proj.lora_{side}"] for side in "AB")
        torch.testing.assert_close(up.flatten(1, 2), b @ a)
    shares = [deltas(layers_of(ep=(rank, 2)), folder) for rank in range(2)]
    torch.testing.assert_close(torch.cat([share[0] for share in shares])[:EXPERTS], up)
    torch.testing.assert_close(torch.cat([share[1] for share in shares])[:EXPERTS], down)
    shares = [deltas(layers_of(tp=(rank, 2)), folder) for rank in range(2)]
    torch.testing.assert_close(torch.cat([share[0] for share in shares], dim=2), up)
    torch.testing.assert_close(torch.cat([share[1] for share in shares], dim=2), down)


def test_one_for_all_experts_takes_less_memory(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "outer")
    assert shares_outer([read_adapter_files(folder)])
    assert not shares_outer([read_adapter_files(write(tmp_path / "b", "stacked"))])
    whole, less = layers_of(), layers_of(shared_outer=True)
    for one, other in zip(deltas(less, folder), deltas(whole, folder), strict=True):
        torch.testing.assert_close(one, other)
    for layers in (whole, less):
        (w13, w2), (matrix, down) = layers.linears, MATRICES
        assert w13.a.numel() + w13.b.numel() == 2 * layers.plan._of_experts(matrix)
        assert w2.a.numel() + w2.b.numel() == 2 * layers.plan._of_experts(down)
    with pytest.raises(UserError, match="--no-experts-shared-outer-loras"):
        less.read(read_adapter_files(tmp_path / "b"))


@pytest.mark.parametrize(
    ("layout", "change", "part"),
    [
        ("stacked", lambda t: t[:3] if t.shape[0] == EXPERTS else t, "of 3 experts"),
        ("stacked", lambda t: t[..., :-1] if t.shape[1] == RANK else t, "another model"),
        ("each", lambda t: t * float("nan"), "not finite"),
        ("flat", lambda t: t[:-1] if t.shape[0] == EXPERTS * RANK else t, "multiples of rank"),
    ],
)
def test_refused(tmp_path: Path, layout: str, change: Any, part: str) -> None:
    tensors = {name: change(tensor).contiguous() for name, tensor in tensors_of(layout).items()}
    with pytest.raises(UserError, match=part):
        layers_of().read(read_adapter_files(write(tmp_path / "a", layout, tensors)))


def test_names_that_are_of_no_expert(tmp_path: Path) -> None:
    for number, name in enumerate((f"{MODULE}.9.w1", f"{MODULE}.0.w9", "model.layers.7.mlp.experts.0.w1")):
        tensors = {f"{name}.lora_A.weight": torch.ones(RANK, HIDDEN), f"{name}.lora_B.weight": torch.ones(DIMS, RANK)}
        with pytest.raises(UserError, match="not served"):
            layers_of().read(read_adapter_files(write(tmp_path / f"{number}", "", tensors)))
    with pytest.raises(UserError, match="--lora-target-modules"):
        layers_of(targets=frozenset({"w2"})).read(read_adapter_files(write(tmp_path / "a", "each")))


def test_which_parameter_one_pair_is_of(tmp_path: Path) -> None:
    flat = {name: t for name, t in tensors_of("flat").items() if ".base_layer" not in name}
    files = read_adapter_files(write(tmp_path / "a", "", flat, target_parameters=["mlp.experts.down_proj"]))
    assert list(files.pairs) == [f"{MODULE}.down_proj"]
    with pytest.raises(UserError, match="must name one of them"):
        read_adapter_files(write(tmp_path / "b", "", flat, target_parameters=None))
