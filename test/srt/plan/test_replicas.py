"""What each replica is started with, and which GPUs they need together."""

from __future__ import annotations

import pytest

from sglang.srt.errors import UserError
from sglang.srt.plan.layout import asked_node, check_gpus, replica_args
from sglang.srt.server_args import ServerArgs


def args(words: str) -> ServerArgs:
    return ServerArgs.from_cli(["--model-path", "m", *words.split()])


def test_gpus_follow_one_another() -> None:
    each = replica_args(args("--dp 3 --tp 2 --pp 2 --base-gpu-id 1 --max-queued-requests 10"))
    assert [list(asked_node(one).devices) for one in each] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert {(one.dp_size, one.max_queued_requests) for one in each} == {(1, 4)}
    assert len({one.random_seed for one in each}) == 1, "a request has the same noise on each"
    node = asked_node(each[1])
    assert [node.device(rank) for rank in node.ranks] == [5, 6, 7, 8]


def test_one_replica_is_the_server() -> None:
    alone = args("--tp 2 --max-queued-requests 10")
    assert replica_args(alone) == [alone]


@pytest.mark.parametrize(
    ("words", "seen", "message"),
    [
        ("--dp 2 --tp 2", 3, "--dp-size 2 --tp-size 2 takes 4 GPUs, but torch sees 3 CUDA devices"),
        ("--tp 2 --base-gpu-id 1", 2, "--tp-size 2 --base-gpu-id 1 takes 3 GPUs, but torch sees 2 CUDA devices"),
        ("--pp 2", 1, "--tp-size 1 --pp-size 2 takes 2 GPUs, but torch sees 1 CUDA devices"),
    ],
)
def test_too_few_gpus(words: str, seen: int, message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_gpus(args(words), seen)
    assert str(refused.value) == f"{message}. Lower one of them."
    check_gpus(args(words), seen + 1)
