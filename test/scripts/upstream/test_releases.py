"""The releases themselves, downloaded from the package index: `pytest -m upstream test/scripts/upstream`."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from pathlib import Path

import pytest
from upstream import rebase, status
from upstream.change import Outcome, Result
from upstream.changes import ALL
from upstream.source import resolve

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
RELEASES = ("0.5.8", "0.5.10", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
COMPILED = ("0.5.12", "0.5.15", "0.5.23")
"""Those whose attention is compiled here, too: minutes each."""
LIMIT = 101_376

APPLIED, UPSTREAM, ABSENT = Outcome.APPLIED, Outcome.ALREADY_UPSTREAM, Outcome.NOT_APPLICABLE
EXPECTED = {
    #                        0.5.8     0.5.10    0.5.12    0.5.15    0.5.18    0.5.20    0.5.21    0.5.22    0.5.23
    "extend-tiles":         (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "tree-mask-tiles":      (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "prefill-tiles":        (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "hybrid-backends":      (APPLIED,  UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM),
    "default-backend":      (UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM),
    "trtllm-mla-prefill":   (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "dsa-backends":         (ABSENT,   APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "dsa-indexer":          (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  UPSTREAM, UPSTREAM, UPSTREAM),
    "dsa-topk":             (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "dsa-attention":        (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "dsa-context-parallel": (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  ABSENT,   ABSENT,   ABSENT,   ABSENT),
    "v4-arguments":         (ABSENT,   ABSENT,   APPLIED,  UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM),
    "v4-indexer":           (ABSENT,   ABSENT,   APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "v4-attention":         (ABSENT,   ABSENT,   APPLIED,  UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM),
    "allreduce-fusion":     (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "mxfp4-layout":         (APPLIED,  UPSTREAM, UPSTREAM, APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "mxfp8-experts":        (ABSENT,   ABSENT,   ABSENT,   ABSENT,   APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "moe-editions":         (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "moe-default":          (APPLIED,  APPLIED,  APPLIED,  UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM, UPSTREAM),
    "moe-capacity":         (APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
    "inkling-stages":       (ABSENT,   ABSENT,   ABSENT,   ABSENT,   APPLIED,  APPLIED,  APPLIED,  APPLIED,  APPLIED),
}  # fmt: skip

MEASURE = """
import json, sys
from types import SimpleNamespace
from pathlib import Path
sys.path[:0] = [{scripts!r}, {python!r}]
from upstream import recording, stub_import
from sglang.ledger.compile import compile_for
from sglang.ledger.variant import Variant
tree = Path({tree!r})
stub_import.enter(tree)
import torch

def launched(call, moe_only=False):
    with recording.recording() as launches:
        call()
    launch = next(l for (l,) in launches if not moe_only or "BLOCK_SIZE_K" in l.constexprs)
    tile = {{"num_warps": launch.num_warps, "num_stages": launch.num_stages}}
    variant = Variant("op", "key", launch.kernel, launch.signature, launch.constexprs, launch.divisible_by_16, tile)
    shared, _, spills, *_ = compile_for(variant, "sm_120").measurement
    return shared, spills

def int32(n):
    return torch.zeros(n, dtype=torch.int32)

extend = stub_import.find(tree, "extend_attention_fwd", "extend_attention.py")
prefill = stub_import.find(tree, "context_attention_fwd", "prefill_attention.py")

def mla(dtype):
    q, o = torch.empty(64, 8, 576, dtype=torch.bfloat16), torch.empty(64, 8, 512, dtype=torch.bfloat16)
    k, cache = torch.empty(64, 1, 576, dtype=torch.bfloat16), torch.empty(256, 1, 576, dtype=dtype)
    new, cached = (k, k[..., :512], o), (cache, cache[..., :512], int32(3), int32(3), int32(64).long())
    extend(q, *new, *cached, None, True, None, 64, 1.0, 1.0)

def tree_mask(head_dim):
    q, cache = (torch.empty(n, 4, head_dim, dtype=torch.bfloat16) for n in (64, 256))
    mask, cached = torch.empty(64 * 256, dtype=torch.bool), (cache, cache, int32(3), int32(3), int32(64).long())
    extend(q, q, q, q, *cached, mask, True, int32(3).long(), 64, 1.0, 1.0)

def vision(head_dim):
    q = torch.empty(64, 8, head_dim, dtype=torch.bfloat16)
    prefill(q, q, q, q, int32(2), int32(2), 64)

moe = stub_import.find(tree, "fused_experts_impl", "fused_moe.py")
configs = sys.modules[sys.modules[moe.__module__].try_get_optimal_moe_config.__module__]
off = SimpleNamespace(enable_deterministic_inference=False)
configs.get_global_server_args, configs.get_exec = lambda: off, lambda: SimpleNamespace(deterministic=off)

def experts():
    weights = [torch.empty(8, *shape, dtype=torch.float8_e4m3fn) for shape in ((384, 512), (512, 192))]
    x, chosen = torch.empty(4096, 512, dtype=torch.bfloat16), torch.empty(4096, 2)
    moe(x, *weights, chosen, chosen.int(), inplace=True, use_fp8_w8a8=True, per_channel_quant=True,
        w1_scale=torch.empty(8, 384, 1), w2_scale=torch.empty(8, 512, 1))

print(json.dumps({{
    **({{"experts": launched(experts, moe_only=True)}} if {experts} else {{}}),
    "mla bf16": launched(lambda: mla(torch.bfloat16)),
    "mla fp8": launched(lambda: mla(torch.float8_e4m3fn)),
    **{{f"vision {{d}}": launched(lambda: vision(d)) for d in (64, 72, 80, 128, 256)}},
    **{{f"tree mask {{d}}": launched(lambda: tree_mask(d)) for d in (64, 128, 256)}},
}}))
"""


def measured(package_parent: Path, experts: bool = False) -> dict[str, tuple[int, int]]:
    """(shared bytes, spilled bytes) on sm_120 of what the tree's own launchers launch on such a card."""
    names = {
        "scripts": str(ROOT / "scripts"),
        "python": str(ROOT / "python"),
        "tree": str(package_parent),
        "experts": experts,
    }
    command = [sys.executable, "-c", MEASURE.format(**names)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: tuple(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, rebase.Rebased]:
    root = tmp_path_factory.mktemp("releases")
    return {release: rebase.rebase(resolve(release), root / release, ALL) for release in RELEASES}


@pytest.mark.parametrize("release", RELEASES)
def test_every_outcome(made: dict[str, rebase.Rebased], release: str) -> None:
    found = {result.change.name: (result.outcome, result.detail) for result in made[release].results}
    expected = {name: row[RELEASES.index(release)] for name, row in EXPECTED.items()}
    assert {name: outcome for name, (outcome, _) in found.items()} == expected, found


def test_the_ledger_in_the_documentation_is_current(made: dict[str, rebase.Rebased]) -> None:
    results: dict[str, tuple[Result, ...]] = {release: made[release].results for release in RELEASES}
    assert status.table(results) == (ROOT / "docs/upstream_status.md").read_text(), (
        "run: python scripts/rebase_upstream.py status " + " ".join(RELEASES) + " --write docs/upstream_status.md"
    )


@pytest.mark.parametrize("release", RELEASES)
def test_the_tree_compiles(made: dict[str, rebase.Rebased], release: str) -> None:
    parent = made[release].package_parent
    for path in sorted({path for result in made[release].results for path in result.changed}):
        assert compileall.compile_file(parent / path, quiet=1, force=True), path


@pytest.mark.parametrize("release", RELEASES)
def test_a_second_run_changes_nothing(made: dict[str, rebase.Rebased], release: str, tmp_path: Path) -> None:
    again = rebase.probe(resolve(str(made[release].package_parent)), ALL)
    for first, second in zip(made[release].results, again, strict=True):
        expected = Outcome.ALREADY_APPLIED if first.outcome is APPLIED else first.outcome
        assert second.outcome is expected, (second.change.name, second.detail)


def test_the_crash_of_0_5_8_is_gone(made: dict[str, rebase.Rebased]) -> None:
    before = measured(resolve("0.5.8").package_parent, experts=True)
    after = measured(made["0.5.8"].package_parent, experts=True)
    assert before["mla bf16"][0] == 106_496
    assert before["experts"][0] == 147_456
    assert before["vision 256"][0] == 163_840
    for name, (shared, spills) in after.items():
        assert shared <= LIMIT and spills == 0, name


@pytest.mark.parametrize("release", COMPILED)
def test_attention_fits_without_spills(made: dict[str, rebase.Rebased], release: str) -> None:
    before, after = measured(resolve(release).package_parent), measured(made[release].package_parent)
    assert before["vision 256"][0] == 163_840 and before["mla fp8"][1] > 0 and before["tree mask 128"][1] > 0
    for name, (shared, spills) in after.items():
        assert shared <= LIMIT and spills == 0, name
