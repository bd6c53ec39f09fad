"""LoRA adapters of projections around experts whose rows two ranks divide (Muse-Spark): the tokens are those of the
reference with the adapter merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import save_file

from srt.managers.test_adapters import NEW_TOKENS, prompt
from srt.managers.test_adapters_in_stages import _rank
from srt.models.ling3_reference import save
from srt.models.muse_spark_reference import AT, CONFIG, MuseSpark, weights

RANK, PROJECTIONS = 4, ("pre_expert_proj", "post_expert_proj")


def greedy(reference: MuseSpark, ids: list[int]) -> list[int]:
    ids = list(ids)
    for _ in range(NEW_TOKENS):
        ids.append(int(reference.logits(ids)[-1].argmax()))
    return ids[-NEW_TOKENS:]


@pytest.mark.thorough
def test_ranks_add_what_their_rows_have(tmp_path: Path) -> None:
    tensors, generator = weights(), torch.Generator().manual_seed(1)
    merged, stored = dict(tensors), {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in PROJECTIONS:
            continue
        a = torch.randn(RANK, tensor.shape[1], generator=generator) * tensor.shape[1] ** -0.5
        b = torch.randn(tensor.shape[0], RANK, generator=generator) * 0.5
        merged[name] = tensor + 2 * b @ a
        at = f"base_model.model.{AT}{module.removeprefix(AT)}"
        stored |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
    model, adapter = save(tmp_path / "model", CONFIG, tensors), tmp_path / "adapter"
    adapter.mkdir()
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(PROJECTIONS)}
    (adapter / "adapter_config.json").write_text(json.dumps(values | {"bias": "none"}))
    save_file(stored, adapter / "adapter_model.safetensors")
    ids = prompt(3)
    plain, changed = (greedy(MuseSpark(each, CONFIG), ids) for each in (tensors, merged))
    assert plain != changed
    asked = {"plain": ("", ids, plain), "changed": (str(adapter), ids, changed)}
    flags = {"tp_size": 2, "ep_size": 2, "lora_target_modules": list(PROJECTIONS)}
    run_ranks(_rank, (str(model), tmp_path, asked, [], flags), 2)
