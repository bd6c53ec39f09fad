"""Ranks cut A and B as they cut the layer: outputs side by side, or partial sums, are those of one rank. Also with
rows of a module in several slices, with padded shares, and in a slot that another adapter had."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from sglang.srt.configs.adapters.files import read_adapter_files
from sglang.srt.errors import UserError
from sglang.srt.layers.adapters import AdapterLayers, ModuleRows
from sglang.srt.plan.adapters import AdapterPlan
from sglang.srt.plan.ranks import ShardRange, padded_share, whole
from sglang.srt.plan.weight_spec import Matrix
from srt.adapter_files import one_layer

HIDDEN = 12
HEIGHTS = {"q": 20, "k": 8, "o": HIDDEN}


def write(folder: Path, seed: int, rank: int, parts: str = "qko") -> Path:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for part in parts:
        name = f"base_model.model.model.layers.0.self_attn.{part}_proj"
        inputs = HEIGHTS["q"] if part == "o" else HIDDEN
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(HEIGHTS[part], rank, generator=generator)
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def unasked(x: torch.Tensor) -> torch.Tensor:
    """A layer's own product."""
    raise AssertionError("only adapters that scale its rows need it")


def deltas(folders: list[Path], x: torch.Tensor, share: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What adapters add on a rank to q and k [T, N], and to the sum of o, of which x [T, q] is the input. The last
    folder's adapter takes the slot of the first one."""
    matrices = (Matrix("attn.qkv", ("q", "k"), 28, HIDDEN), Matrix("attn.o", ("",), HIDDEN, 20))
    model = one_layer(experts=None)
    weights = SimpleNamespace(model=model, layers=(matrices,))
    plan = SimpleNamespace(
        adapters=AdapterPlan(2, 5, None, dora=True), entry=lambda op: op.reference, weights=weights,
        description=model,
    )  # fmt: skip
    layers = AdapterLayers(plan, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    at = "model.layers.0.self_attn."
    q, k = (padded_share(total, -(-total // (4 * ranks)) * 4, share) for total in (20, 8))
    half = q.count // 2
    slices = [slice(q.run.start, q.run.start + half), slice(q.run.start + half, q.run.stop)]
    widths = [half, q.padded_count - half]
    pieces = [ShardRange(20, run, width) for run, width in zip(slices, widths, strict=True)]
    inner = whole(HIDDEN)
    column = layers.linear(
        [
            ModuleRows(f"{at}q_proj", "q", pieces[0], inner),
            ModuleRows(f"{at}k_proj", "k", k, inner),
            ModuleRows(f"{at}q_proj", "q", pieces[1], inner),
        ],
        unasked,
        None,
    )
    row = layers.linear([ModuleRows(f"{at}o_proj", "", whole(HIDDEN), q)], unasked, None)
    assert column is not None and row is not None
    for number, folder in enumerate(folders):
        layers.load(number % 2 + 1, layers.read(read_adapter_files(folder)))
    layers.begin_step(torch.tensor([1, 0, 2, 1], dtype=torch.int32))
    outputs = column.added(lambda: torch.zeros(4, q.padded_count + k.padded_count), x[:, :HIDDEN])
    mine = torch.zeros(4, q.padded_count)
    mine[:, : q.count] = x[:, q.run]
    summed = row.added(lambda: torch.zeros(4, HIDDEN), mine)
    parts = outputs[:, :half], outputs[:, half + k.padded_count :][:, : q.count - half]
    return torch.cat((*parts, outputs[:, half : half + k.count]), dim=1), summed


@pytest.mark.parametrize("tensor", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_numbers_that_are_not_finite(tmp_path: Path, tensor: str) -> None:
    """The message says what is wrong, and not that the file cannot be read."""
    folder = write(tmp_path / "a", 1, 5, "o")
    file, module = folder / "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.o_proj"
    tensors = safetensors.torch.load_file(file)
    tensors[f"{module}.lora_magnitude_vector"] = torch.ones(HIDDEN)
    tensors[f"{module}.{tensor}"].view(-1)[1] = torch.nan
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UserError) as caught:
        deltas([folder], torch.zeros(4, 20), 0, 1)
    assert str(caught.value).startswith(f"{folder}: ") and "not finite" in str(caught.value)


def test_two_ranks_are_one(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a", 1, 5), write(tmp_path / "b", 2, 3, "q"), write(tmp_path / "c", 3, 2, "ko")]
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(9))
    outputs, summed = deltas(folders, x, 0, 1)
    exact = torch.zeros(4, 28)
    files = {name: safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors") for name in "bc"}
    for token, name, part, cols in (
        (0, "c", "k", slice(20, 28)),
        (3, "c", "k", slice(20, 28)),
        (2, "b", "q", slice(20)),
    ):
        module = f"base_model.model.model.layers.0.self_attn.{part}_proj"
        a, b = files[name][f"{module}.lora_A.weight"], files[name][f"{module}.lora_B.weight"]
        exact[token, cols] = b @ (a @ x[token, :HIDDEN])
    torch.testing.assert_close(outputs, exact)
    shares = [deltas(folders, x, share, 2) for share in range(2)]
    sizes = [padded_share(20, 12, share).count for share in range(2)]
    q = torch.cat([part[:, :size] for (part, _), size in zip(shares, sizes, strict=True)], dim=1)
    k = torch.cat([part[:, size:] for (part, _), size in zip(shares, sizes, strict=True)], dim=1)
    torch.testing.assert_close(torch.cat((q, k), dim=1), outputs)
    torch.testing.assert_close(shares[0][1] + shares[1][1], summed)
    assert summed[0].any() and not summed[2].any()
