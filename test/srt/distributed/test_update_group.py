"""A group with a trainer that does not send."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from live_server import free_port

from sglang.srt.distributed import update_group
from sglang.srt.distributed.update_group import UpdateGroup
from sglang.srt.errors import UserError

TRAINER = """
import os, sys, torch
from sglang.srt.distributed.update_group import UpdateGroup
group = UpdateGroup("127.0.0.1", int(sys.argv[1]), 0, 2, "trainers", "gloo")
group.send(torch.arange(4.0))
sys.stdin.read()
os._exit(0)
"""
"""Sends one tensor and then nothing, as a trainer that was stopped."""


def test_the_wait_for_a_tensor_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port)], stdin=subprocess.PIPE)
    try:
        group = UpdateGroup("127.0.0.1", port, 1, 2, "trainers", "gloo")
        assert group.receive((4,), torch.float32).tolist() == [0, 1, 2, 3]
        monkeypatch.setattr(update_group, "RECEIVE_LIMIT", timedelta(milliseconds=50))
        with pytest.raises(UserError, match="has sent nothing"):
            group.receive((4,), torch.float32)
        group.close()
    finally:
        trainer.communicate()
