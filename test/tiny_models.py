"""Models that tests make are made once a run: whichever process needs one first keeps it for the others.

`pytest_configure` of the run's first process names a folder for them, which the processes of all workers inherit.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    import torch

FOLDER = "TINY_MODELS"
"""Environment variable: the folder of this run. Without it models are made each time, as in a script."""
LARGEST_BYTES = 16 << 20
"""Of weights. Larger ones, a tenth of them, would take gigabytes of the disk together."""

Model = TypeVar("Model", bound="torch.nn.Module")


class RunFolder:
    """A plugin of the process that starts the run: makes the folder and removes it."""

    def pytest_configure(self, config: pytest.Config) -> None:
        os.environ[FOLDER] = self.folder = tempfile.mkdtemp(prefix="tiny-models-")

    def pytest_unconfigure(self) -> None:
        del os.environ[FOLDER]
        shutil.rmtree(self.folder, ignore_errors=True)


def made_once(what: object, folder: Path, make: Callable[[Path], Model]) -> Model:
    """The model that `make` returns for a folder, in which it saves it. what: all that the model follows from; `repr`
    of it tells models apart. The files in `folder` are copies, and random numbers go on as if it had just been made."""
    run = os.environ.get(FOLDER)
    if run is None:
        return make(folder)
    kept = Path(run, hashlib.sha256(repr(what).encode()).hexdigest()[:24])
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            return _keep(kept, folder, make)
    import torch  # slow, and the process that starts the run does not need it

    shutil.copytree(kept / "saved", folder, dirs_exist_ok=True)
    model, state = torch.load(kept / "model", weights_only=False)
    torch.set_rng_state(state)
    return model  # type: ignore[no-any-return]


def _keep(kept: Path, folder: Path, make: Callable[[Path], Model]) -> Model:
    import torch

    unfinished = kept.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    model = make(unfinished / "saved")
    shutil.copytree(unfinished / "saved", folder, dirs_exist_ok=True)
    if sum(weights.numel() * weights.element_size() for weights in model.parameters()) <= LARGEST_BYTES:
        torch.save((model, torch.get_rng_state()), unfinished / "model")
        unfinished.rename(kept)
    else:
        shutil.rmtree(unfinished)
    return model
