"""New weights in a rank of a running server: what the control calls do.

A whole model is staged on all replicas before any of them commits. Tensors are written at once where the kernels read
the checkpoint's own form; elsewhere they are kept, and a second copy of the model is staged from the directory and all
that was sent. Ranks agree before anything is written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.update_group import UpdateGroup
from sglang.srt.errors import UserError
from sglang.srt.managers.wire.io_struct import ControlReply, ControlReq
from sglang.srt.model_loader.sent_tensors import STORED_NAMES
from sglang.srt.model_loader.staged_weights import SELECTORS, ServedWeights, commit, forget_staged, lacks, placed, put
from sglang.srt.model_loader.tensor_pairs import TensorPair
from sglang.srt.utils.engine_state import StateError

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
    from sglang.srt.managers.scheduler.memory_control import MemoryControl
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAX_TENSORS = 1 << 17
"""Tensors of one call."""
MAX_ELEMENTS = 1 << 36
CHUNK = 1 << 24
"""Bytes of a tensor that are hashed at a time."""
CHECKED_AT_ONCE = 1 << 26
"""Values of a tensor of which a GPU is asked at a time whether they are finite."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_NAMES}
Tensors = dict[str, torch.Tensor]


class WeightUpdates:
    """The weights of this rank, with what is staged and what was sent."""

    def __init__(
        self, args: ServerArgs, runner: ModelRunner, scheduler: Scheduler | AttentionGroups, memory: MemoryControl
    ) -> None:
        self.args, self.runner, self.scheduler = args, runner, scheduler
        self.memory, self.state = memory, memory.state
        memory.lost_weights = self
        self._served: ServedWeights | None = None
        self._staged: list[TensorPair] | None = None
        self._staged_path: str | None = None
        self._collected: dict[str, Tensors] | None = None
        """Tensors by selector since /begin_weight_update, where they cannot be written one by one; None: no update
        has begun."""
        self._written: set[str] = set()
        """Names that were written since the weights could not be used."""
        self._groups: dict[str, UpdateGroup] = {}
        self._snapshot: dict[str, str] | None = None

    @property
    def served(self) -> ServedWeights:
        """Returns the weights of this rank."""
        if self._served is None:
            media = self.runner.media
            draft = getattr(self.runner.drafter, "model", None)
            self._served = ServedWeights(
                self.runner.plan, self.runner.model, draft, None if media is None else media.encoder
            )
        return self._served

    def control(self, msg: ControlReq) -> ControlReply:
        """Answers a call of `CALLS`; the reply has the state of the engine."""
        try:
            data = CALLS[msg.kind](self, msg.args)
        except (UserError, StateError) as error:
            return ControlReply(msg.id, False, str(error), {"state": self.state.to_wire()})
        return ControlReply(msg.id, data={**data, "state": self.state.to_wire()})

    # --- whole models -------------------------------------------------------------------------------------------------

    def _stage(self, args: dict[str, Any]) -> dict[str, Any]:
        """Reads a directory into a second copy. Nothing that is served changes."""
        self._refuse()
        self._drop({})

        def stage() -> None:
            self._staged = self._copy(args["path"], {}, {}, args["load_format"])

        self._on_all_ranks(stage, self._drop)
        self._staged_path = args["path"]
        return {"bytes": sum(pair.served.nbytes for pair in self._staged or ())}

    def _commit(self, args: dict[str, Any]) -> dict[str, Any]:
        """Makes the staged copy the served weights."""
        if self._staged is None:
            raise StateError("no new weights are staged")
        self._write(self._staged, args)
        served = self.served
        served.path, served.sent, served.sent_to_draft = self._staged_path or served.path, {}, {}
        served.written, served.replaced = False, True
        self._drop({})
        self._restored()
        return {}

    def _drop(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Forgets the staged copy."""
        if self._staged is not None:
            self._staged = None
            forget_staged()
        return {}

    def _copy(self, path: str | None, sent: Tensors, to_draft: Tensors, load_format: str = "") -> list[TensorPair]:
        served = self.served
        device = served.place()
        if parallel_state.num_ranks() > 1 and not parallel_state.all_ranks_agree(device == "cuda"):
            device = "cpu"
        load_format, seed = load_format or self.args.load_format, self.args.random_seed or 0
        return served.stage(path, sent, to_draft, load_format, seed, device)

    def _write(self, pairs: list[TensorPair], args: dict[str, Any]) -> None:
        self.state.refuse_without_weights()  # a sleep may have come since they were staged
        self._refuse_scaled()
        self.scheduler.sync()
        try:
            commit(pairs)
        except Exception as error:
            raise UserError(self._broke(error)) from None
        self._changed(args)

    def _broke(self, error: Exception) -> str:
        """Notes that a part of the weights was written, and returns what to say."""
        self.forget_written()
        self.state.break_weights(f"an update stopped half-way ({error}); send all of them again")
        return self.state.problem

    def _restored(self) -> None:
        """Notes that all weights are those of an update."""
        self.forget_written()
        self.state.weights_restored()

    def _changed(self, args: dict[str, Any]) -> None:
        """Keeps what was computed with other weights apart from now on."""
        for scheduler in getattr(self.scheduler, "schedulers", [self.scheduler]):
            scheduler.change_weights(args["key"], args["version"])
        self.memory.weights_changed()

    # --- weights that were lost in a sleep ----------------------------------------------------------------------------

    def tensors_read_again(self) -> list[torch.Tensor]:
        """Returns the tensors that `read_again` writes."""
        return self.served.tensors_read_again()

    def problem_of_losing(self) -> str:
        """Returns why weights that are lost could neither be read nor be sent; "" if they could."""
        served = self.served
        if served.refuse() and (why := served.problem_of_reading()):
            return f"weights that are lost could not come back, as {why}; keep them in main memory (level 1)"
        return ""

    def problem_of_reading(self) -> str:
        """Returns why the weights cannot be read again from where they came; "" if they can."""
        served = self.served
        if served.written:
            return "tensors were sent since, which no directory has"
        return served.problem_of_reading()

    def forget_written(self) -> None:
        """Notes that what was written of weights that could not be used is lost too."""
        self._written.clear()

    def read_again(self, key: str) -> None:
        """Reads the weights into their memory. Raises UserError on all ranks."""
        self.scheduler.sync()
        load_format, seed = self.args.load_format, self.args.random_seed or 0
        self._on_all_ranks(lambda: self.served.read_again(load_format, seed))
        forget_staged()
        self._changed({"key": key, "version": None})
        self._restored()

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _begin(self, args: dict[str, Any]) -> dict[str, Any]:
        self._refuse()
        if self._collected is not None:
            raise StateError("an update has begun already: send /end_weight_update first")
        _selected(args["selector"])
        self._collected = {}
        return {}

    def _end(self, args: dict[str, Any]) -> dict[str, Any]:
        if self._collected is None:
            raise StateError("no update has begun: send /begin_weight_update first")
        collected, self._collected = self._collected, None
        if collected:
            self._restage(collected, args)
        return {}

    def _tensors(self, args: dict[str, Any]) -> dict[str, Any]:
        """Takes tensors from files, of which every rank reads its own, or the only one."""
        self._refuse()
        files, rank = args["files"], parallel_state.tp_rank() % len(args["files"])
        tensors: Tensors = {}

        def read() -> None:
            tensors.update(_unflattened(load_file(Path(files[rank])), args["bucket"]))

        self._on_all_ranks(read)
        self._take(tensors, args)
        return {}

    def _distributed(self, args: dict[str, Any]) -> dict[str, Any]:
        """Receives tensors that the trainer broadcasts."""
        self._refuse()
        group = self._groups.get(args["group_name"])
        if group is None:
            raise StateError(f"there is no group {args['group_name']!r}: send /init_weights_update_group first")
        specs = [(name, _dtype(kind), tuple(shape)) for name, kind, shape in args["tensors"]]
        tensors: Tensors = {}
        try:
            self._on_all_ranks(
                lambda: tensors.update((name, group.receive(shape, kind)) for name, kind, shape in specs)
            )
        except UserError as error:
            self._destroy_group(args)
            raise UserError(f"{error}; nothing was written, and the group is closed") from None
        self._take(tensors, args)
        return {}

    def _take(self, tensors: Tensors, args: dict[str, Any]) -> None:
        """Writes tensors at once, or keeps them until the update ends, or stages a copy with them."""
        selector = _selected(args["selector"])
        if len(tensors) > MAX_TENSORS:
            raise UserError(f"{len(tensors)} tensors in one call; at most {MAX_TENSORS}")
        served = self.served
        if selector == "draft" and parallel_state.all_ranks_agree(served.draft is None):
            raise UserError("this server has no draft with weights; leave selector out")
        if parallel_state.all_ranks_agree(served.takes_single_tensors):
            self._write_tensors(tensors, selector, args)
            return
        self._on_all_ranks(lambda: _refuse_not_finite(tensors, served.plan.device))
        kept = {name: tensor.cpu() for name, tensor in tensors.items()}
        if self._collected is not None:
            self._collected.setdefault(selector, {}).update(kept)
        else:
            self._restage({selector: kept}, args)

    def _write_tensors(self, tensors: Tensors, selector: str, args: dict[str, Any]) -> None:
        chosen = self.served.parts(selector)

        def check() -> None:
            unknown = [set[str]() for _ in chosen]
            for part, missing in zip(chosen, unknown, strict=True):
                names: list[str] = []
                placed(part, tensors, names)
                missing.update(names)
            if unknown and (nowhere := sorted(set.intersection(*unknown))):
                raise UserError(f"the model has no such weights: {', '.join(nowhere[:10])}")
            _refuse_not_finite(tensors, self.served.plan.device)

        self._on_all_ranks(check)
        self.scheduler.sync()
        try:
            with torch.inference_mode():
                for part in chosen:
                    put(part, tensors)
        except Exception as error:
            raise UserError(self._broke(error)) from None
        wrote_target = selector != "draft" and not parallel_state.all_ranks_agree(not tensors)
        self.served.written = self.served.written or wrote_target
        self._changed(args)
        if not self.state.weights_lost and not self.state.broken:
            return
        self._written.update(tensors)
        lost = self.served.parts("all" if self.state.broken else "target")  # a draft keeps its weights in a sleep
        if parallel_state.all_ranks_agree(not any(lacks(part, self._written) for part in lost)):
            self._restored()

    def _restage(self, collected: dict[str, Tensors], args: dict[str, Any]) -> None:
        """Stages and commits a copy of the directory's weights with all tensors that were ever sent."""
        served = self.served
        sent, to_draft = dict(served.sent), dict(served.sent_to_draft)
        for selector, tensors in collected.items():
            (to_draft if selector == "draft" else sent).update(tensors)
        pairs: list[TensorPair] = []
        self._on_all_ranks(lambda: pairs.extend(self._copy(None, sent, to_draft)))
        self._write(pairs, args)
        served.sent, served.sent_to_draft = sent, to_draft
        self._restored()
        pairs.clear()
        forget_staged()

    def _init_group(self, args: dict[str, Any]) -> dict[str, Any]:
        name = args["group_name"]
        if name in self._groups:
            raise StateError(f"there is a group {name!r} already: send /destroy_weights_update_group first")
        rank = args["rank_offset"] + parallel_state.rank()
        joined: list[UpdateGroup] = []
        address = (args["master_address"], args["master_port"])
        self._on_all_ranks(
            lambda: joined.append(UpdateGroup(*address, rank, args["world_size"], name, args["backend"]))
        )
        self._groups[name] = joined[0]
        return {}

    def _destroy_group(self, args: dict[str, Any]) -> dict[str, Any]:
        group = self._groups.pop(args["group_name"], None)
        if group is None:
            raise StateError(f"there is no group {args['group_name']!r}")
        group.close()
        return {}

    def _set_version(self, args: dict[str, Any]) -> dict[str, Any]:
        for scheduler in getattr(self.scheduler, "schedulers", [self.scheduler]):
            scheduler.change_weights(None, args["version"])
        return {}

    # --- looking ------------------------------------------------------------------------------------------------------

    def _named(self, args: dict[str, Any]) -> dict[str, Any]:
        """Returns the first values of a tensor of this rank, by the checkpoint's name."""
        self.state.refuse_without_weights()
        name, served = args["name"], self.served
        for part in (*served.parts("target"), *served.parts("draft")):
            for param in part.params.values():
                for key, piece in param.parts.items():
                    if part.weights.checkpoint_name(param.name, key) == name:
                        rows = param.tensor[piece.dest]
                        return {"values": rows.flatten()[: args["truncate_size"]].float().tolist()}
        if served.plan.model.quantization is not None:
            raise UserError("the checkpoint's form of quantized weights is not kept; compare with /weights_checker")
        raise UserError(f"the model has no weight {name!r}")

    def _check(self, args: dict[str, Any]) -> dict[str, Any]:
        """Hashes the weights, or compares them with those of a snapshot."""
        self.state.refuse_without_weights()
        self.scheduler.sync()
        action, skipped = args["action"], set(args["skip"])
        if action == "reset_tensors":
            self.forget_written()
            self.state.break_weights("they were reset by /weights_checker; send all of them again")
            with torch.inference_mode():
                for tensor in self.served.replaceable(args["selector"]):
                    tensor.zero_()
            self._changed({"key": args["key"], "version": None})
            return {}
        sums = {name: _checksum(t) for name, t in self.served.tensors(args["selector"]) if name not in skipped}
        if action == "snapshot":
            self._snapshot = sums
        elif action == "compare":
            if self._snapshot is None:
                raise StateError("there is no snapshot to compare with: send the action snapshot first")
            other = sorted(name for name, value in sums.items() if self._snapshot.get(name) != value)
            if other:
                raise UserError(f"{len(other)} tensors differ from the snapshot: {', '.join(other[:10])}")
        whole = hashlib.sha256("".join(f"{name}{sums[name]}" for name in sorted(sums)).encode()).hexdigest()
        return {"checksums": sums, "per_gpu_checksum": _of_all_ranks(whole)}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        self.state.refuse_without_weights()
        if why := self.served.refuse():
            raise UserError(f"the weights of this server cannot be replaced: {why}")
        if any(req.slot and req.media is not None for req in self.scheduler.reqs.values()):
            raise StateError("requests run, whose images were read with the old weights: pause with abort or retract")
        self._refuse_scaled()

    def _refuse_scaled(self) -> None:
        """Raises StateError while adapters are loaded whose factors are of the weights as they are (DoRA)."""
        adapters = getattr(self.scheduler, "adapters", None)
        if adapters is not None and adapters.has_scaled:
            raise StateError("LoRA adapters with use_dora have lengths of the old weights: unload them first")

    def _on_all_ranks(self, work: Callable[[], None], undo: Callable[[Mapping[str, Any]], Any] | None = None) -> None:
        """Does what may fail on one rank only, and raises UserError on all of them if it does."""
        problem = ""
        try:
            work()
        except (UserError, StateError) as error:
            logger.warning("New weights are refused: %s", error)
            problem = str(error)
        except Exception as error:
            logger.exception("New weights are refused")
            problem = repr(error)
        if parallel_state.all_ranks_agree(not problem):
            return
        if undo is not None:
            undo({})
        raise UserError(problem or "another rank cannot take these weights; its log says why")


def _selected(selector: str) -> str:
    if selector not in SELECTORS:
        raise UserError(f"selector must be one of {', '.join(SELECTORS)}")
    return selector


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise UserError(f"type {name[:32]!r} is not one of {', '.join(DTYPES)}")
    return dtype


def _unflattened(tensors: Tensors, bucket: list[dict[str, Any]] | None) -> Tensors:
    """Cuts a flattened bucket into its tensors. bucket: their names, types, shapes and places; None: it is none."""
    if bucket is None:
        return tensors
    flat = tensors["flattened_tensor"].view(-1).view(torch.uint8)
    cut: Tensors = {}
    for entry in bucket:
        dtype, shape = _dtype(entry["dtype"]), torch.Size(entry["shape"])
        begin, size = entry["begin"], shape.numel() * dtype.itemsize
        if begin < 0 or min(shape, default=0) < 0 or begin + size > len(flat):
            raise UserError(f"{entry['name'][:80]!r} does not lie in the bucket of {len(flat)} bytes")
        cut[entry["name"]] = flat[begin : begin + size].clone().view(dtype).view(shape)
    return cut


def _refuse_not_finite(tensors: Tensors, device: str) -> None:
    checked = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    broken = [name for name, tensor in checked.items() if tensor.element_size() > 1 and not _is_finite(tensor, device)]
    if broken:
        raise UserError(f"weights that are NaN or infinite: {', '.join(sorted(broken)[:10])}")


def _is_finite(tensor: torch.Tensor, device: str) -> bool:
    """Returns whether all values are. On a CPU `aminmax` takes a ninth of the time of `isfinite`."""
    pieces = tensor.flatten().split(CHECKED_AT_ONCE)
    return all(bool(end.isfinite()) for piece in pieces for end in piece.to(device).aminmax())


def _of_all_ranks(digest: str) -> list[str]:
    """Returns the hexadecimal digests of all ranks. A collective."""
    words = [int(digest[i : i + 8], 16) for i in range(0, 64, 8)]
    numbers = [0] * 8 * parallel_state.num_ranks()
    begin = 8 * parallel_state.rank()
    numbers[begin : begin + 8] = words
    everyone = parallel_state.all_reduce_max(numbers)
    return ["".join(f"{word:08x}" for word in everyone[i : i + 8]) for i in range(0, len(everyone), 8)]


def _checksum(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256()
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for chunk in flat.split(CHUNK):
        digest.update(chunk.cpu().numpy().tobytes())
    return digest.hexdigest()


CALLS: dict[str, Callable[[WeightUpdates, dict[str, Any]], dict[str, Any]]] = {
    "stage_weights": WeightUpdates._stage,
    "commit_weights": WeightUpdates._commit,
    "drop_weights": WeightUpdates._drop,
    "begin_weights": WeightUpdates._begin,
    "end_weights": WeightUpdates._end,
    "weights_from_tensors": WeightUpdates._tensors,
    "weights_from_group": WeightUpdates._distributed,
    "init_weights_group": WeightUpdates._init_group,
    "destroy_weights_group": WeightUpdates._destroy_group,
    "weight_version": WeightUpdates._set_version,
    "weights_by_name": WeightUpdates._named,
    "check_weights": WeightUpdates._check,
}
"""Control calls about weights, with the arguments that `managers/front/weight_updates.py` sends."""
