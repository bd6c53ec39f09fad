"""verl's own server class in a Ray actor, where it starts the engine, and its own sender of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERL = Path(os.environ.get("VERL", Path(__file__).parents[2] / "build" / "verl"))
"""VERL: the folder that has the package `verl` and what its server imports."""

pytestmark = pytest.mark.clients


@pytest.mark.timeout(600)
def test_a_round_of_training_by_verls_server() -> None:
    if not (VERL / "ray").is_dir():
        pytest.skip("verl is not installed: make clients")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(VERL)])
    # Actors run at a niceness of 15 otherwise, and beside other tests do not come to run at all.
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    environment = os.environ | {"PYTHONPATH": path} | ray
    program = [sys.executable, str(Path(__file__).with_name("verl_round.py"))]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=570)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert len(said["old"]) == said["log_probs"] == 8
    assert said["new"] != said["old"] == said["again"]
    assert [ids[0] for ids in said["prompt"]] == [4, 5, 6, 0]
    assert said["aborted"] == "abort" and said["steps"] == [None, 1, 2]
    assert said["processes"] > 1 and said["left"] == 0, "processes of the engine outlive the actor"
