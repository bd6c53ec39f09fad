"""Models and formats as they are published, small: they compute what their codes and scales stand for, and a tensor
that is missing, left over or of another shape is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.errors import UserError
from sglang.srt.model_loader.loader import load_model

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, reference_of
from .published_checkpoints import PUBLISHED, read_shards, write_published, write_shards

TOKENS = random_tokens(23, seed=1)
TOLERANCE = {"rtol": 0.0, "atol": 5e-4}
SCALES = ("weight_scale_inv", "weight_scale_2", "weight_scale")


@pytest.fixture(scope="module", params=PUBLISHED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    write_published(PUBLISHED[request.param], folder)
    return request.param, folder


def test_it_computes_what_it_stands_for(checkpoint: tuple[str, Path]) -> None:
    name, folder = checkpoint
    row = PUBLISHED[name]
    model = reference_of(folder / "reference")
    want = hf_logits(model, TOKENS)
    assert want.std() > 0.1
    plan = plan_for(folder / "quantized")
    assert plan.kv_cache_dtype == ("fp8_e4m3" if row.cache_scales else "float32"), "what it was made for"
    plan = plan_for(folder / "quantized", kv_cache_dtype="float32")
    runner = TinyRunner(plan)
    pieces = (runner.extend({2: TOKENS[:12]})[0], runner.extend({2: TOKENS[12:20]})[0])
    got = torch.cat((*pieces, *(runner.decode({2: token}) for token in TOKENS[20:])))
    torch.testing.assert_close(got, want, **TOLERANCE)
    allocated = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert allocated == plan.weight_bytes(), "the plan counts other bytes than are allocated"
    if row.cache_scales:
        rounded = TinyRunner(plan_for(folder / "quantized"))
        latent = any(cache.name == "latent" for cache in rounded.model.caches)
        assert {(c.k_scale, c.v_scale) for c in rounded.model.caches} == {(0.5, 0.5 if latent else 0.25)}
        assert 0 < (rounded.extend({1: TOKENS})[0] - want).norm() < 0.3 * want.norm()


def of_the_last_layer(names: list[str]) -> str:
    """A scale where there is one; otherwise a weight of an expert."""
    mine = [name for name in sorted(names) if ".layers.2." in name]
    return next(
        name for name in sorted(mine, key=lambda name: not name.endswith(SCALES)) if "mlp" in name or "moe" in name
    )


def test_experts_are_called_as_mistral_calls_them(tmp_path: Path) -> None:
    write_published(PUBLISHED["Mixtral-8x22B-v0.1"], tmp_path)
    assert {f"model.layers.0.block_sparse_moe.experts.3.w{i}.weight" for i in (1, 2, 3)} < read_shards(
        tmp_path / "quantized"
    ).keys()


@pytest.mark.values
@pytest.mark.parametrize("fault", ["misshapen", "missing", "extra"])  # most checkpoints have the first in `make test`
def test_a_tensor_that_does_not_fit_is_named(checkpoint: tuple[str, Path], fault: str, tmp_path: Path) -> None:
    _, folder = checkpoint
    for path in (folder / "quantized").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    tensors = read_shards(folder / "quantized")
    name = of_the_last_layer(list(tensors))
    if fault == "missing":
        del tensors[name]
        message = f"lacks weights of the model: {name}"
    elif fault == "extra":
        name = name.rpartition(".")[0] + ".surprise"
        tensors[name] = torch.ones(4)
        message = f"has weights that the model does not have: {name}"
    else:
        tensors[name] = torch.ones(7, 3).to(tensors[name].dtype)
        message = f"tensor {name} has shape [7, 3], but config.json calls for"
    write_shards(tensors, tmp_path)
    with pytest.raises(UserError) as caught:
        load_model(plan_for(tmp_path, kv_cache_dtype="float32"))
    assert message in str(caught.value)
