"""Clients of every kind, a third of which leaves or aborts: the others get what they would alone, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from fuzz.guarded_server import MIB, GuardedServer
from fuzz.scale import LONG, SOAK_REQUESTS, SOAK_ROUNDS, TIMEOUT_S
from fuzz.soak_jobs import Job, make_job, reference_jobs, run_jobs, with_answers

CONTEXT = 512
WARM_UP_REQUESTS = 60
POOL = 1024


def run_round(url: str, number: int, num_jobs: int, references: Sequence[Job]) -> dict[str, int]:
    rng = random.Random(number)
    jobs = [make_job(f"round-{number}-{i}", rng, references) for i in range(num_jobs)]
    ends = asyncio.run(run_jobs(url, jobs))
    return {end: ends.count(end) for end in sorted(set(ends))}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("page_size", [1, 16] if LONG else [16])
def test_soak(page_size: int) -> None:
    """After each round the pool and the request slots are exactly free, no task and no socket is left in the front,
    and no process holds more than a tenth above what it had after a first round."""
    flags = ["--context-length", CONTEXT, "--max-total-tokens", POOL, "--max-running-requests", 24]
    flags += ["--chunked-prefill-size", 64, "--page-size", page_size]
    flags += ["--schedule-conservativeness", 0.1]
    server = GuardedServer(*map(str, flags))
    references: list[Job] = []

    def warm_up(url: str) -> None:
        references.extend(with_answers(url, reference_jobs()))
        run_round(url, 0, WARM_UP_REQUESTS, references)

    server.start(warm_up)
    try:
        for number in range(1, SOAK_ROUNDS + 1):
            counts = run_round(server.url, number, SOAK_REQUESTS, references)
            state = server.internal_state()
            server.check_health()
            server.check_rest()
            memory = {name: round(size / MIB, 1) for name, size in server.observe_rest().memory.items()}
            print(f"\npage size {page_size}: {counts}, retractions {state['num_retracted_reqs']}, MiB {memory}")
            assert counts["ok"] > SOAK_REQUESTS // 4 and counts["left"] > 0 and counts["aborted"] > 0
        print(server.figures, "silences within the limits:", server.silences, sep="\n")
    finally:
        server.end()
