"""The LoRA adapters of a scheduler: those in main memory, and which of them lie in the slots of the device.

An adapter's id is that of its content, so requests of it may share cached prefixes, whatever it is called. Every rank
reads it in a thread beside the steps; the calls that begin, ask and end are messages, the same for all ranks.

An adapter may leave its slot once no request that runs has it: steps run in order on one stream, and so does the copy
of the next adapter behind the last step that reads the slot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.configs.adapters.files import content_id, read_adapter_files
from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.leader import DrainSlots
from sglang.srt.model_loader.adapter_bases import refuse_changed_bases

if TYPE_CHECKING:
    from sglang.srt.layers.adapter_memory import HostAdapter
    from sglang.srt.managers.scheduler.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_PASSED = 32
"""Requests with an adapter that enter before one which waits for a slot; then others wait behind it until one is
free."""
LRU = "lru"


class Reading:
    """An adapter that a thread reads."""

    def __init__(self, runner: ModelRunner, adapter_id: str, path: str) -> None:
        self.adapter: HostAdapter | None = None
        self.problem = ""
        self._work = runner, adapter_id, path
        self.thread = threading.Thread(target=self._read, name="adapter", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        runner, adapter_id, path = self._work
        plan, layers = runner.plan, runner.adapters
        assert layers is not None
        try:
            files = read_adapter_files(Path(path))
            self.adapter = layers.read(files)
            refuse_changed_bases(files, plan.model.model_path, layers.names, plan.description.tie_embeddings)
            if content_id(files.folder) != adapter_id:
                raise UserError(f"{path} has changed, or differs between machines.")
        except UserError as error:
            self.problem = str(error)
        except Exception as error:  # nothing of a file may end the server
            logger.exception("The adapter %s cannot be read", path)
            self.problem = f"{path} cannot be read: {error!r}."


@dataclass(slots=True)
class Loaded:
    """An adapter in main memory. `slot`: counted from 1; 0: in none."""

    adapter: HostAdapter
    pinned: bool = False
    slot: int = 0
    last_used: int = 0
    """When a request of it last entered, counted in such entries."""
    placed: int = 0
    """When it came to its slot, likewise."""


@dataclass(slots=True)
class Turn:
    """The first request that waits for a slot in a queue, and how many others have passed it."""

    rid: str = ""
    passed: int = 0
    since: float = field(default_factory=lambda: time.monotonic())
    told: bool = False
    """Whether the leader has decided that it has waited long."""


class AdapterTable:
    """The adapters, and their slots."""

    def __init__(self, runner: ModelRunner, policy: str, most: int | None, drain_after_s: float = 0.0) -> None:
        """policy: as --lora-eviction-policy; most: adapters in main memory, None: any number; drain_after_s: as
        --lora-drain-wait-threshold."""
        assert runner.adapters is not None
        self._runner, self._policy, self._most = runner, policy, most
        self._num_slots, self._drain_after_s = runner.adapters.plan.slots, drain_after_s
        self._loaded: dict[str, Loaded] = {}
        self._reading: dict[str, Reading] = {}
        self._clock = 0
        self.turn = Turn()
        self.entering = Entering(self, ())

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._loaded

    # --- loading ------------------------------------------------------------------------------------------------------

    def begin(self, adapter_id: str, path: str) -> None:
        """Begins to read an adapter, unless it is there."""
        if adapter_id not in self._loaded and adapter_id not in self._reading:
            self._reading[adapter_id] = Reading(self._runner, adapter_id, path)

    def is_read(self, adapter_id: str) -> bool:
        """Returns whether nothing reads the adapter any more, on this rank."""
        reading = self._reading.get(adapter_id)
        return reading is None or not reading.thread.is_alive()

    def end(self, adapter_id: str, pinned: bool) -> str:
        """Takes an adapter that was read. Returns why it cannot be served; "": it is. A collective."""
        reading = self._reading.pop(adapter_id, None)
        problem = ""
        if reading is not None:
            reading.thread.join()
            problem = reading.problem
        elif adapter_id not in self._loaded:
            problem = "nothing has read the adapter"
        if problem := _of_all_ranks(problem):
            return problem
        if reading is None:
            loaded = self._loaded[adapter_id]
        elif self._most is not None and len(self._loaded) >= self._most:
            return f"{self._most} adapters are loaded, as many as --max-loaded-loras allows; unload one first"
        else:
            assert reading.adapter is not None
            loaded = Loaded(reading.adapter)
        if pinned and not loaded.pinned and self._num_pinned() + 1 >= self._num_slots:
            return f"--max-loras-per-batch {self._num_slots} leaves no slot for others if one more adapter is pinned"
        layers = self._runner.adapters
        assert layers is not None
        if layers.plan.dora and (problem := _of_all_ranks(layers.scale(loaded.adapter))):
            return problem
        loaded.pinned = loaded.pinned or pinned
        self._loaded[adapter_id] = loaded
        return ""

    def unload(self, adapter_id: str) -> None:
        """Forgets an adapter that no request has, also one that is being read."""
        self._loaded.pop(adapter_id, None)
        self.forget_reading(adapter_id)

    def forget_reading(self, adapter_id: str) -> None:
        """Forgets what was read of an adapter, or is being read."""
        self._reading.pop(adapter_id, None)

    @property
    def has_scaled(self) -> bool:
        """Returns whether an adapter is loaded that scales rows of the model's weights."""
        return any(loaded.adapter.scales for loaded in self._loaded.values())

    def _num_pinned(self) -> int:
        return sum(loaded.pinned for loaded in self._loaded.values())

    # --- slots --------------------------------------------------------------------------------------------------------

    def begin_step(self, running: Iterable[Req]) -> None:
        """Begins the choice of requests for a step. running: those that have a request slot."""
        self.entering = Entering(self, (req.adapter for req in running if req.adapter is not None))

    def slot_for(self, adapter_id: str, in_use: Collection[str]) -> int:
        """Returns a slot that has the adapter, or may get it; 0: all others are in use."""
        loaded = self._loaded[adapter_id]
        if loaded.slot:
            return loaded.slot
        taken = {each.slot: name for name, each in self._loaded.items() if each.slot}
        free = next((slot for slot in range(1, self._num_slots + 1) if slot not in taken), 0)
        if free:
            return free
        idle = [slot for slot, name in taken.items() if name not in in_use and not self._loaded[name].pinned]
        return min(idle, key=lambda slot: self._age(taken[slot]), default=0)

    def _age(self, adapter_id: str) -> int:
        loaded = self._loaded[adapter_id]
        return loaded.last_used if self._policy == LRU else loaded.placed

    def place(self, req: Req) -> None:
        """Gives a request that enters its adapter, which `Entering.may_enter` allowed."""
        if req.adapter is None:
            self._runner.set_adapter(req.slot, 0)
            return
        loaded = self._loaded[req.adapter]
        self._clock += 1
        loaded.last_used = self._clock
        if not loaded.slot:
            slot = self.slot_for(req.adapter, self.entering.in_use)
            assert slot, "a request entered without a slot for its adapter"
            for other in self._loaded.values():
                if other.slot == slot:
                    other.slot = 0
            self._runner.load_adapter(slot, loaded.adapter)
            loaded.slot, loaded.placed = slot, self._clock
        self.entering.entered(req)
        self._runner.set_adapter(req.slot, loaded.slot)

    def decisions(self) -> list[DrainSlots]:
        """Returns the leader's new decision about the request that waits for a slot."""
        turn, limit = self.turn, self._drain_after_s
        if not limit or not turn.rid or turn.told or time.monotonic() - turn.since < limit:
            return []
        turn.told = True
        return [DrainSlots(turn.rid)]

    def drain(self, rid: str) -> None:
        """Lets no other request with an adapter pass this one, if it is the one that waits for a slot."""
        if self.turn.rid == rid:
            self.turn.passed = MAX_PASSED

    def usage(self) -> dict[str, int]:
        """Returns how many adapters are in main memory, and how many of these in slots."""
        return {"loaded": len(self._loaded), "in_slots": sum(1 for each in self._loaded.values() if each.slot)}


def _of_all_ranks(problem: str) -> str:
    """Returns this rank's problem with an adapter, or that another has one, whose log has its own; "": none has one. A
    collective."""
    if parallel_state.all_reduce_min([int(not problem)])[0]:
        return ""
    if problem:
        logger.error("A LoRA adapter cannot be served: %s", problem)
    return problem or "another rank cannot serve the adapter; its log says why"


class Entering:
    """The requests that enter one step."""

    def __init__(self, table: AdapterTable, in_use: Iterable[str]) -> None:
        """in_use: adapters of the requests that run."""
        self.table, self.in_use, self._blocked = table, set(in_use), False

    def may_enter(self, req: Req) -> bool:
        """Returns whether a slot has a request's adapter, or can get it now. Requests that are asked about come in the
        order of the queue. One without a slot is passed by others a bounded number of times."""
        if req.adapter is None:
            return True
        turn = self.table.turn
        if self._blocked and turn.passed >= MAX_PASSED:
            return False
        if self.table.slot_for(req.adapter, self.in_use):
            return True
        if not self._blocked:
            self._blocked = True
            if turn.rid != req.rid:
                self.table.turn = Turn(req.rid)
        return False

    def entered(self, req: Req) -> None:
        """Notes that a request has entered."""
        assert req.adapter is not None
        self.in_use.add(req.adapter)
        if self._blocked:
            self.table.turn.passed += 1
