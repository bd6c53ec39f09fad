"""New weights for a running model: read into a second model, with all steps after loading, and copied into the memory
of the first once all of them are known to fit.

The copy is staged on the GPU where it has room, and otherwise in main memory, so a failure leaves the served weights as
they are. Addresses do not change, so CUDA graphs stay valid.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import free_memory_bytes
from sglang.srt.layers.parameter import Param
from sglang.srt.layers.quantization.experts import Experts
from sglang.srt.model_loader.loader import check_part, fill_part, fill_random, index_parts, load_checkpoint, name_of
from sglang.srt.model_loader.reads import Reads
from sglang.srt.model_loader.sent_tensors import SentTensor, Tensors
from sglang.srt.model_loader.tensor_pairs import TensorPair, copy_pairs, tensor_pairs
from sglang.srt.models.build import build_model
from sglang.srt.models.causal_lm import CausalLM, Loadable
from sglang.srt.towers.create_encoder import create_encoder

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan
    from sglang.srt.plan.weight_names import PartKey

logger = logging.getLogger(__name__)

ROOM = 1.15
"""How much memory a second copy needs while it is made, as a multiple of the weights."""
GPU_RESERVE = 1 << 30
"""Bytes of GPU memory that stay free."""
SELECTORS = ("target", "draft", "all")


class ServedWeights:
    """The weights of a running model: its layers, those of its draft, and its encoder of images."""

    def __init__(self, plan: Plan, model: CausalLM, draft: Any = None, encoder: Any = None) -> None:
        """draft, encoder: None: there is none."""
        self.plan, self.model, self.draft, self.encoder = plan, model, draft, encoder
        self.path = plan.model.model_path
        """Directory of the weights that are served."""
        self.draft_path = None if plan.draft is None else plan.draft.config.model_path
        self.sent: dict[str, torch.Tensor] = {}
        """Tensors that were sent since, in main memory: kept where a layer's other tensors are needed again."""
        self.replaced = False
        """Whether another directory's weights have taken the place of the first ones."""
        self.written = False
        """Whether tensors that were sent were written and not kept, so that the directory has not what is served."""
        self.sent_to_draft: dict[str, torch.Tensor] = {}

    def refuse(self) -> str:
        """Returns why this model's weights cannot be replaced while it runs; "" if they can."""
        plan = self.plan
        if plan.expert_slots is not None:
            return (
                "experts lie in main memory (--enable-paged-experts), in a form that is not written twice; keep them"
                " on more GPUs (--tp-size), or start a server with the new weights"
            )
        media = plan.description.media
        if media is not None and media.tower.on_host:
            return "layers of the encoder lie in main memory (--encoder-in-main-memory); start without the flag"
        if self.model.beside:
            return "the model has parts with checkpoints of their own; start a server with the new weights"
        if any(Path(self.path).glob("*.gguf")) or (Path(self.path) / "gguf.json").exists():
            return "weights in GGUF are not replaced; send or store them as safetensors"
        return ""

    # --- whole models -------------------------------------------------------------------------------------------------

    def stage(
        self, path: str | None, sent: Tensors, to_draft: Tensors, load_format: str, seed: int, device: str
    ) -> list[TensorPair]:
        """Reads a second copy of all weights and returns it beside the served one. path: the directory; None: that of
        the served weights. device: where the copy lies. Raises UserError; nothing has changed then."""
        served, start = self.path if path is None else path, time.perf_counter()
        plan, dtype = self.plan, getattr(torch, self.plan.dtype)

        def fill(part: Loadable, folder: str, tensors: Tensors) -> None:
            if load_format == "dummy" and path is None and not self.replaced:
                fill_random(part.params, seed)
                put(part, tensors)
            else:
                load_checkpoint(part, folder, dtype, tensors)
            for step in part.finish:
                step()

        with torch.inference_mode():
            model = build_model(plan, device)
            fill(model, served, sent)
            if plan.model.quantization is not None:
                model.params.clear()
            pairs = tensor_pairs(self.model, model)
            if self.draft is not None and plan.draft is not None:
                has_checkpoint = self.draft_path != plan.model.model_path
                draft = resolve_name(plan.draft.description.form.computed_by)(plan, model)
                for part, folder in draft.loadables():
                    mine = folder == self.draft_path and has_checkpoint
                    fill(part, folder if mine else served, to_draft if mine else {**sent, **to_draft})
                if plan.draft.description.model.quantization is not None:
                    for part, _ in draft.loadables():
                        part.params.clear()
                pairs += tensor_pairs(self.draft, draft)
            if self.encoder is not None and plan.description.media is not None:
                tower = create_encoder(plan, plan.description.media.tower)
                fill(tower, served, {})
                pairs += tensor_pairs(self.encoder, tower)
        num_bytes = sum(pair.served.nbytes for pair in pairs)
        logger.info(
            "Staged %.2f GB of new weights on %s in %.1f s", num_bytes / 1e9, device, time.perf_counter() - start
        )
        return pairs

    # --- weights whose memory has lost them ---------------------------------------------------------------------------

    def problem_of_reading(self) -> str:
        """Returns why the weights cannot be read again; "" if they can."""
        if self.plan.expert_slots is not None:
            return "experts lie in main memory (--enable-paged-experts), of which there is no room for a second copy"
        if self.model.beside and not self._reads_in_place:
            return "the model has parts with checkpoints of their own"
        return ""

    def read_again(self, load_format: str, seed: int) -> None:
        """Reads the weights of the directory, and what was sent since, into the served memory: at once where the
        parameters are what the kernels read, else by way of a second copy. Raises UserError."""
        if not self._reads_in_place:
            commit(self.stage(None, self.sent, self.sent_to_draft, load_format, seed, self.place()))
            return
        beside = [(part, str(Path(self.path) / folder)) for folder, part in self.model.beside.items()]
        with torch.inference_mode():
            for part, folder in [(self.model, self.path), *beside]:
                if load_format == "dummy" and not self.replaced:
                    fill_random(part.params, seed)
                else:
                    load_checkpoint(part, folder, getattr(torch, self.plan.dtype))

    def tensors_read_again(self) -> list[torch.Tensor]:
        """Returns the tensors that `read_again` writes: no others may be lost."""
        if not self._reads_in_place:
            return [tensor for _, tensor in self.tensors() if _is_dense(tensor)]
        return [p.tensor for part in (self.model, *self.model.beside.values()) for p in part.params.values()]

    @property
    def _reads_in_place(self) -> bool:
        beside = self.model.beside.values()
        return self.takes_single_tensors and all(map(_changes_nothing, (step for p in beside for step in p.finish)))

    def place(self) -> str:
        """Returns where a second copy has room: the model's device, or the CPU. Raises UserError if nowhere."""
        need = int(self.num_bytes() * ROOM)
        on_gpu = self.plan.device == "cuda"
        if on_gpu and free_memory_bytes(torch.cuda.current_device()) > need + GPU_RESERVE:
            return "cuda"
        free = free_memory_bytes(None) // max(1, self.plan.ranks.world_size)
        if free < need:
            raise UserError(
                f"a second copy of the weights takes {need / 1024**3:.1f} GiB for each GPU, and main memory has"
                f" {free / 1024**3:.1f} GiB; nothing was changed"
            )
        return "cpu"

    def num_bytes(self) -> int:
        """Returns the bytes of this rank's weights."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self, selector: str = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors that a step reads, by where they are kept."""
        for name, top in (("target", self.model), ("draft", self.draft), ("encoder", self.encoder)):
            chosen = selector == "all" or name == selector or (selector == "target" and name == "encoder")
            if top is not None and chosen:
                yield from ((f"{name}.{pair.path}", pair.served) for pair in tensor_pairs(top, top))

    # --- tensors written at once --------------------------------------------------------------------------------------

    def parts(self, selector: str = "all") -> list[Loadable]:
        """Returns what tensors are sent for. A draft with a checkpoint of its own has other tensors of the same names,
        and gets only those that are sent for drafts."""
        drafts = [] if self.draft is None else self.draft.loadables()
        has_checkpoint = self.draft_path != self.plan.model.model_path
        if selector == "all":
            drafts = [(part, folder) for part, folder in drafts if not (has_checkpoint and folder == self.draft_path)]
        target: list[Loadable] = [] if selector == "draft" else [self.model]
        return target if selector == "target" else [*target, *(part for part, _ in drafts)]

    @property
    def takes_single_tensors(self) -> bool:
        """Returns whether the parameters are what the kernels read, so that each tensor can be written at once."""
        return self.plan.model.quantization is None and all(
            bool(part.params) and all(map(_changes_nothing, part.finish))
            for selector in ("target", "draft")
            for part in self.parts(selector)
        )

    def replaceable(self, selector: str) -> list[torch.Tensor]:
        """Returns what tensors that are sent replace, once all of them are."""
        if not self.takes_single_tensors:
            return [tensor for _, tensor in self.tensors(selector)]
        return [param.tensor for part in self.parts(selector) for param in part.params.values()]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements lie beside one another, in any order."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


def _changes_nothing(step: Any) -> bool:
    """Returns whether a step after loading leaves 16-bit weights as they are."""
    owner = getattr(step, "__self__", None)
    return isinstance(owner, Experts) and owner.quant is None and not owner.num_slots


def put(part: Loadable, tensors: Tensors) -> list[str]:
    """Writes tensors into a part's parameters and returns the names of those that it does not have."""
    unknown: list[str] = []
    places = placed(part, tensors, unknown)
    with Reads() as reads:
        for name, param, key, view in places:
            fill_part(param, key, name, view, view, reads)
        reads.wait()
    return unknown


def placed(part: Loadable, tensors: Tensors, unknown: list[str]) -> list[tuple[str, Param, PartKey, SentTensor]]:
    """Returns where each tensor belongs, after a check of its shape and type. Appends names that the part does not have
    to `unknown`. Raises UserError."""
    wanted = index_parts(part.weights, part.params.values())
    places: list[tuple[str, Param, PartKey, SentTensor]] = []
    for stored, tensor in tensors.items():
        name, view = name_of(part, stored, wanted), SentTensor(tensor)
        if name not in wanted:
            if not part.ignored_weight(name):
                unknown.append(stored)
            continue
        for param, key in wanted[name]:
            check_part(param, key, stored, view)
            places.append((stored, param, key, view))
    return places


def lacks(part: Loadable, names: Collection[str]) -> bool:
    """Returns whether a part needs tensors besides those with these names."""
    wanted = index_parts(part.weights, part.params.values())
    known = {name_of(part, name, wanted) for name in names}
    needed = (name for name, filled in wanted.items() if not all(p.parts[key].optional for p, key in filled))
    return any(name not in known for name in needed)


def commit(pairs: list[TensorPair]) -> None:
    """Copies staged weights over the served ones."""
    with torch.inference_mode():
        copy_pairs(pairs)
        if any(pair.served.is_cuda for pair in pairs):
            torch.cuda.synchronize()


def forget_staged() -> None:
    """Frees the memory of a copy that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
