"""Asks for the facts of a class in a process of its own, and keeps the answers for the next start."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.plan.transformers_backend.facts import GENERATE, ClassFacts, ClassRequest

SECONDS = 180
"""Processor time of a trial; most take a few seconds, nearly all of it to import torch."""
WORKING_BYTES = 16 << 30
"""Address space of a trial beyond what its libraries take. A run without weights takes little."""
_TRIAL = "sglang.srt.models.transformers_backend.trial"
_ABOUT_CHECKPOINTS = ("quantization_config", "compression_config")


def request_of(
    values: Mapping[str, Any], directory: str, trust_remote_code: bool, task: str = GENERATE
) -> ClassRequest:
    """Returns the request for the class of a config.json, without what is about its checkpoint."""
    kept = {key: value for key, value in values.items() if key not in _ABOUT_CHECKPOINTS}
    # Only code that the directory brings is read from there.
    return ClassRequest(kept, directory if "auto_map" in values else "", trust_remote_code, task)


def facts_of(request: ClassRequest) -> ClassFacts:
    """Returns the facts of a class. They are found once for each config, by a run without weights, and kept under
    SGLANG_CACHE_DIR, apart from those of code that may change with its directory. Raises UserError where the run fails
    or exceeds its limits."""
    return _facts_of(msgspec.json.encode(request))


@lru_cache(maxsize=64)
def _facts_of(asked: bytes) -> ClassFacts:
    request = msgspec.json.decode(asked, type=ClassRequest)
    if request.own_code:
        return msgspec.json.decode(_trial(asked), type=ClassFacts)
    kept = envs.SGLANG_CACHE_DIR / "class_facts" / f"{hashlib.sha256(asked + _programs()).hexdigest()}.json"
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(kept.read_bytes(), type=ClassFacts)
    answer = _trial(asked)
    facts = msgspec.json.decode(answer, type=ClassFacts)
    with suppress(OSError):  # a read-only home: the next start asks again
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(answer)
        unfinished.replace(kept)
    return facts


@lru_cache(maxsize=1)
def _programs() -> bytes:
    """Returns what the facts depend on besides the request: the version of transformers, and our own code."""
    folder = Path(__file__).parents[2] / "models" / "transformers_backend"
    sources = [*sorted(folder.glob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()
    return importlib.metadata.version("transformers").encode() + digest


def _trial(asked: bytes) -> bytes:
    command = [sys.executable, "-m", _TRIAL, str(SECONDS), str(WORKING_BYTES)]
    try:
        ended = subprocess.run(command, input=asked, capture_output=True, timeout=2 * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the model's class in transformers did not run without weights within {2 * SECONDS} s."
        ) from None
    if ended.returncode != 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1][:300] if lines else f"its process ended with {ended.returncode}"
        raise UserError(f"the model's class in transformers cannot be run without weights ({said}).")
    return ended.stdout
