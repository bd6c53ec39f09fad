"""The comparison of two trees on a GPU, without one: its reference, its judgement, and a run against small servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_server import free_port

pytest.importorskip("safetensors")

from upstream.gpu import judge, kernels, serve
from upstream.gpu.cases import CASES, Case, arguments, inputs, reference

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "upstream_on_gpu.py"
EXTEND = Case("extend", 64, 64, 4, 2)


def sdpa(case: Case) -> torch.Tensor:
    """The case by torch's attention, request by request."""
    given = inputs(case, short=True)
    outputs = []
    for number, (rows, slots) in enumerate(
        zip(torch.arange(sum(given.new)).split(given.new), given.slots, strict=True)
    ):
        keys, values = given.cache_k[slots].float(), given.cache_v[slots].float()
        if case.op != "decode":
            keys, values = torch.cat([keys, given.k[rows].float()]), torch.cat([values, given.v[rows].float()])
        mask = torch.ones(len(rows), len(keys), dtype=torch.bool)
        if case.op != "decode":
            mask = mask.tril(len(slots)) if case.causal else mask
            if case.window > 0:
                mask = mask.triu(len(slots) - case.window)
            if case.tree:
                mask[:, len(slots) :] = given.masks[number]
        q, keys, values = (x.transpose(0, 1)[None] for x in (given.q[rows].float(), keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, mask, scale=given.sm_scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.kv == "bf16" and not c.cap and not c.sinks], ids=lambda case: case.name
)
def test_reference_is_torch_attention(case: Case) -> None:
    torch.testing.assert_close(reference(case, inputs(case, short=True), "cpu"), sdpa(case), rtol=1e-4, atol=1e-5)


def test_reference_of_caps_and_sinks() -> None:
    plain, capped, sunk = (
        replace(EXTEND, cap=cap, sinks=sinks) for cap, sinks in ((0.0, False), (2.0, False), (0.0, True))
    )
    given = inputs(plain, short=True)
    base = reference(plain, given, "cpu")
    assert (reference(capped, given, "cpu") - base).norm() > 0.1 * base.norm()
    torch.testing.assert_close(reference(replace(plain, cap=1e4), given, "cpu"), base, rtol=1e-3, atol=1e-3)
    sinks = torch.full((4,), 2.0)
    with_sinks = reference(sunk, replace(given, sinks=sinks), "cpu")
    # the first request has one token and no cache: all but the sink's share is left of its value
    q, k = given.q[0].float(), given.k[0].float().repeat_interleave(2, 0)
    score = (q * k).sum(-1) * given.sm_scale
    torch.testing.assert_close(with_sinks[0], base[0] * torch.sigmoid(score - sinks)[:, None])


def test_cases_have_names_of_their_own_and_cover_what_they_should() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.op for case in CASES} == set(kernels.LAUNCHERS)
    trees = [mask for case in CASES if case.tree for mask in inputs(case, short=True).masks]
    assert all(mask.diagonal().all() and not mask.triu(1).any() for mask in trees)
    assert any(not mask.equal(torch.ones_like(mask).tril()) for mask in trees)


def test_masks_are_laid_out_as_rows_of_all_tokens_seen() -> None:
    case = replace(EXTEND, tree=True)
    given = inputs(case, short=True)
    named, _ = arguments(case, given, "cpu")
    start, end = named["mask_indptr"][1:3].tolist()
    second = named["custom_mask"][start:end].view(given.new[1], -1)
    cached = len(given.slots[1])
    assert second[:, :cached].all() and second[:, cached:].equal(given.masks[1])


def ran(out: torch.Tensor, tile: tuple[int, int, int], planned: list[int] | None = None) -> dict:
    launch = {"kernel": "k", "BLOCK_M": tile[0], "BLOCK_N": tile[1], "num_warps": tile[2]}
    return {"out": out, "launches": [launch], "planned": planned}


def test_judgement() -> None:
    expected = reference(EXTEND, inputs(EXTEND, short=True), "cpu")
    good = expected.bfloat16().float()
    pristine, produced = ran(good, (128, 64, 4)), ran(expected, (64, 64, 4), [64, 64, 4])
    row = judge.judge(EXTEND, pristine, produced, expected)
    assert row["problems"] == [] and row["tiles_differ"] and judge.overall([row]) == []

    spoiled = good.clone()
    spoiled[5, 1] *= 1.05  # one head of one token
    nan = good.clone()
    nan[0, 0, 0] = float("nan")
    for bad in (ran(spoiled, (64, 64, 4)), ran(nan, (64, 64, 4)), ran(good * 1.01, (64, 64, 4)), {"error": "Boom\n"}):
        assert judge.judge(EXTEND, pristine, bad, expected)["problems"]
    assert "table of SM120 tiles" in str(judge.judge(EXTEND, pristine, ran(good, (64, 64, 4), [32, 64, 8]), expected))
    same = judge.judge(EXTEND, pristine, ran(good, (128, 64, 4)), expected)
    assert same["problems"] == [] and "no case ran with another tile" in judge.overall([same])[0]
    failing = judge.judge(EXTEND, {"error": "x\nOutOfResources: shared memory"}, produced, expected)
    assert failing["problems"] == [] and "OutOfResources" in failing["note"]


def test_judgement_of_answers() -> None:
    top = [{1: -1.0, 2: -1.1, 3: -3.0}, {4: -0.5}]
    first = [{"output_ids": [1, 4], "output": [-1.0, -0.5], "input": [-2.0, -3.0], "top": top}]
    assert judge.compare_answers(first, first)["problems"] == []

    def changed(**other: list) -> list[str]:
        return judge.compare_answers(first, [first[0] | other])["problems"]

    assert changed(output_ids=[2, 4], output=[-1.0, -0.5]) == []  # a near tie
    assert "not close" in changed(output_ids=[3, 4])[0]
    assert "not close" in changed(output_ids=[9, 4])[0]
    assert "differ by 1.000" in changed(input=[-2.0, -4.0])[0]
    assert "tokens" in changed(output_ids=[1], output=[-1.0])[0]


def test_a_case_that_fails_is_recorded_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launcher(op: str):
        if op == "decode":
            raise ImportError("no decode here")
        return lambda **named: named["o_extend" if op == "extend" else "o"].fill_(1.0)

    monkeypatch.setattr(kernels, "launcher", launcher)
    monkeypatch.setattr(kernels, "CASES", (EXTEND, Case("decode", 64, 64, 4, 2), Case("prefill", 64, 64, 4, 2)))
    kernels.main(["--side", "x", "--out", str(tmp_path), "--device", "cpu", "--short"])
    results = [torch.load(tmp_path / f"{i}-x.pt") for i in range(3)]
    assert "no decode here" in results[1]["error"]
    assert results[0]["out"].eq(1).all() and results[2]["out"].eq(1).all()


LAUNCH_SERVER = """
    import argparse, json, os, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    parser = argparse.ArgumentParser()
    for flag in ("model-path", "port"):
        parser.add_argument("--" + flag)
    args, _ = parser.parse_known_args()
    assert os.path.exists(os.path.join(args.model_path, "model.safetensors"))
    if BROKEN:
        sys.exit("this server does not start")

    class Handler(BaseHTTPRequestHandler):
        def reply(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def do_GET(self):
            self.reply({})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = body.get("input_ids", [])
            tokens = range(body.get("sampling_params", {}).get("max_new_tokens", 0))
            shift = SHIFT if os.environ.get("SGLANG_FORCE_SM120_TILES") == "1" else 0.0
            meta = {
                "input_token_logprobs": [[None, 0, None]] + [[-1.0 + shift, i, None] for i in ids[1:]],
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
                "output_top_logprobs": [[[-1.0, token, None]] for token in tokens],
                "cached_tokens": max(0, len(ids) - 256),
            }
            self.reply({"meta_info": meta})

        def log_message(self, *_):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(args.port)), Handler).serve_forever()
"""


def fake_tree(folder: Path, shift: float = 0.0, broken: bool = False) -> Path:
    (folder / "sglang/srt").mkdir(parents=True)
    (folder / "sglang/__init__.py").touch()
    (folder / "sglang/srt/server_args.py").touch()
    source = textwrap.dedent(LAUNCH_SERVER)
    (folder / "sglang/launch_server.py").write_text(f"SHIFT, BROKEN = {shift}, {broken}\n{source}")
    return folder


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def run(tmp_path: Path, produced: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    port = free_port(400)  # of the two servers
    pristine = fake_tree(tmp_path / "pristine")
    command = [sys.executable, str(SCRIPT), "--pristine", str(pristine), "--produced", str(produced)]
    command += ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out/results.json")]
    command += ["--parts", "server", "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return done, json.loads((tmp_path / "out/results.json").read_text())


def test_servers_that_agree(tmp_path: Path) -> None:
    done, results = run(tmp_path, fake_tree(tmp_path / "produced"))
    assert done.returncode == 0, done.stdout + done.stderr
    compared = results["server"]["compared"]["all at once"]
    assert compared["max_logprob"] == 0.0 and compared["equal_tokens"] == serve.OUTPUT_TOKENS * 8
    assert results["server"]["cached_tokens"][-1] > 0


def test_servers_that_differ_or_do_not_start(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    done, _ = run(tmp_path / "a", fake_tree(tmp_path / "shifted", shift=0.3))
    assert done.returncode == 1 and "log probabilities differ by 0.300" in done.stdout
    (tmp_path / "b").mkdir()
    done, results = run(tmp_path / "b", fake_tree(tmp_path / "broken", broken=True))
    assert done.returncode == 1 and "this server does not start" in results["server"]["problems"][0]


def test_what_no_tree_or_model_can_be_made_of(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--pristine",
            str(tmp_path),
            "--produced",
            str(tmp_path),
            "--model",
            "x",
            "--out",
            "y",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "give the folder that holds `sglang`" in done.stderr
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="qwen3"):
        serve.write_checkpoint(tmp_path, tmp_path / "out", "cpu")
