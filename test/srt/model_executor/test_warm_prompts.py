"""The prompts that a start computes so that requests wait for no compilation: each is one that a request may bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.layers.moe.fused_moe_triton.align import ONE_PROGRAM_PAIRS
from srt.model_executor.test_canary import runner_of


@pytest.mark.parametrize(("context_len", "longest"), [(4096, None), (32_768, 32_767), (1 << 20, (1 << 18) + 1023)])
def test_no_prompt_is_longer_than_the_tables_of_positions(
    context_len: int, longest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables end where the pool does, far before the context: a kernel that reads behind them ends the server."""
    runner = runner_of(
        "glm_moe_dsa", tmp_path, json_model_override_args=f'{{"max_position_embeddings": {context_len}}}'
    )
    lengths: list[int] = []
    monkeypatch.setattr(runner, "run_padding", lambda num, prefix=0: lengths.append(num + prefix))
    runner._compile_prompts()
    assert max(lengths) <= runner.plan.num_positions <= context_len
    if longest is not None:
        assert longest in lengths


DENSE = '{"max_position_embeddings": 4096, "index_topk": 400}'


def test_prompts_of_both_paths_behind_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest prompt attends to selected entries, and expanding the latents of one cached token does not pay for a
    short one: so neither of them meets the kernels that expand a prefix."""
    runner = runner_of("glm_moe_dsa", tmp_path, json_model_override_args=DENSE)
    ((site, sparse),) = runner.state.attention.sparse.items()
    spec = runner.state.attention._latent[site]
    prompts: list[tuple[int, int]] = []
    monkeypatch.setattr(runner, "run_padding", lambda num, prefix=0: prompts.append((num, prefix)))
    runner._compile_prompts()
    dense = {(num, prefix) for num, prefix in prompts if num + prefix <= sparse.top_k}
    assert any(prefix and spec.expanding_pays([prefix], [num]) for num, prefix in dense)
    assert any(num + prefix > sparse.top_k for num, prefix in prompts)


def test_the_longest_prompt_whose_pairs_one_program_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it the same tile has other kernels that group pairs: the end of its bucket does not show them."""
    runner = runner_of("glm_moe_dsa", tmp_path, json_model_override_args='{"max_position_embeddings": 4096}')
    monkeypatch.setattr(type(runner), "longest_prompt", 4095)
    lengths: list[int] = []
    monkeypatch.setattr(runner, "run_padding", lambda num, prefix=0: lengths.append(num))
    runner._compile_prompts()
    (top_k,) = {layer.ffn.experts.router.top_k for layer in runner.plan.description.layers if layer.ffn.experts}
    assert ONE_PROGRAM_PAIRS // (top_k + 1) in lengths
