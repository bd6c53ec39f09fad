"""What is planned for DeepSeek-V4: kernels that graphs can hold, the switches to plain torch, and flags that ask for
what it does not have."""

from __future__ import annotations

import json

import pytest

from sglang import explain
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import Choice
from sglang.srt.server_args import ServerArgs
from srt.kernels import published

OURS = ("hyper_connection", "shared_kv_norm_rope_store", "tail_rotation", "kv_compressor", "clamped_swiglu")
REFERENCE = "torch_native"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(published.any_checkpoint("deepseek_v4", tmp_path_factory.mktemp("v4") / "m"))


def explained(folder: str, *flags: str) -> explain.Explanation:
    args = ServerArgs.from_cli(["--model-path", folder, "--tp", "4", *flags])
    return explain.explain(args, arch_by_name("rtx-pro-6000-server"), frozenset({"triton"}))


def kernels(found: explain.Explanation) -> dict[str, str]:
    return {made.need.op: made.name for made in found.outcomes if isinstance(made, Choice) and made.need.op in OURS}


def test_its_steps_run_from_graphs(folder: str) -> None:
    found = explained(folder)
    assert kernels(found) == dict.fromkeys(OURS, "triton")
    assert (
        found.plan is not None and found.plan["cuda_graph_bs"] and max(found.plan["cuda_graph_prefill_tokens"]) == 512
    )


@pytest.mark.parametrize(
    ("variable", "ops", "graphs"),
    [
        ("SGLANG_OPT_USE_TILELANG_MHC_PRE", {"hyper_connection"}, True),
        ("SGLANG_OPT_USE_TILELANG_MHC_POST", {"hyper_connection"}, True),
        ("SGLANG_SM120_TRITON_FLASHMLA", {"shared_kv_norm_rope_store", "tail_rotation", "kv_compressor"}, False),
    ],
)
def test_switches_to_plain_torch(
    variable: str, ops: set[str], graphs: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    found = explained(folder)
    assert {op for op, name in kernels(found).items() if name == REFERENCE} == ops
    assert found.plan is not None and bool(found.plan["cuda_graph_bs"]) is graphs


def test_sizes_that_are_no_powers_of_two_take_plain_torch(folder: str) -> None:
    found = explained(
        folder, "--json-model-override-args", '{"hc_mult": 3, "compress_ratios": [0, 12], "num_hidden_layers": 2}'
    )
    chosen = kernels(found)
    assert {op for op, name in chosen.items() if name == REFERENCE} == {"hyper_connection", "kv_compressor"}


def test_heads_that_read_one_stream_are_refused(folder: str) -> None:
    """Before a weight is read."""
    with pytest.raises(UserError, match=r"several streams.*EAGLE3 draft takes.*NEXTN or DSPARK"):
        explained(folder, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder)
    assert explained(folder, "--speculative-algorithm", "NGRAM").plan is not None


DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
    "num_nextn_predict_layers": 3,
}


def test_drafts_that_a_checkpoint_brings(folder: str) -> None:
    mtp = explained(folder, "--speculative-algorithm", "NEXTN").plan
    assert mtp is not None and (mtp["draft"]["layers"], mtp["draft"]["aux_layers"]) == (1, [42])
    assert list(mtp["window_tokens"]) == ["128"]
    flags = ("--json-model-override-args", json.dumps(DSPARK), "--speculative-algorithm", "DSPARK")
    with pytest.raises(UserError, match="brings no DSpark draft"):
        explained(folder, "--speculative-algorithm", "DSPARK")
    block = explained(folder, *flags).plan
    assert block is not None and (block["draft"]["layers"], block["draft"]["aux_layers"]) == (3, [40, 41, 42])
    # A row of a block sees 128 tokens before the block.
    assert list(block["window_tokens"]) == ["128", "129"]
    with pytest.raises(UserError, match="blocks of 5 draft tokens, of which 7 cannot be asked"):
        explained(folder, *flags, "--speculative-dspark-block-size", "7")


@pytest.mark.parametrize("name", ["nsa", "dsa", "dsv4", "compressed", "torch_native"])
def test_backends_of_attention_have_no_effect(name: str, folder: str) -> None:
    found = explained(folder, "--attention-backend", name)
    (note,) = (note for note in found.notes if "--attention-backend" in note)
    assert note == f"--attention-backend {name} has no effect for this model: triton serves sparse_attention"


def test_indexer_keys_in_four_bits_have_no_effect(folder: str) -> None:
    assert explained(folder, "--enable-deepseek-v4-fp4-indexer").plan is not None
