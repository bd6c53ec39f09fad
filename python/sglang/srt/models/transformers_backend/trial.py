"""Finds the facts of a model class of transformers by a run on the meta device, without weights.

`python -m sglang.srt.models.transformers_backend.trial SECONDS BYTES` reads a ClassRequest from its input and writes
ClassFacts: the classes run in a process of their own, with limits of time and memory, and what plans needs no torch.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from typing import Any

import msgspec
import torch
from transformers import masking_utils

from sglang.srt.errors import UserError
from sglang.srt.models.transformers_backend.build import VISION, class_of, config_of, create, register
from sglang.srt.models.transformers_backend.calls import TOKENS, Calls
from sglang.srt.models.transformers_backend.checkpoint_names import renamings
from sglang.srt.models.transformers_backend.head import Given, decoder_of
from sglang.srt.models.transformers_backend.reading import Reading, Refused, run
from sglang.srt.models.transformers_backend.stages import LayerCalls
from sglang.srt.models.transformers_backend.text_trial import read_text_class
from sglang.srt.plan.transformers_backend.facts import GENERATE, ClassFacts, ClassRequest, HeadFact
from sglang.srt.utils.process_limits import die_with_parent, limit_memory, lower_limit

_TRIAL = "sglang_trial"
_LOOKS_AT_VALUES = (
    "its class decides by the values of tensors how to go on, such as a loop over the chosen experts, so that a step"
    " would wait for the device"
)
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embeddings that are computed anew where a text is longer than those before it."""


def facts_of(request: ClassRequest) -> ClassFacts:
    """Returns the facts of the class that a config names, or why it cannot be served (`problems`)."""
    name = request.architecture
    try:
        return _facts(name, request)
    except UserError as error:
        return ClassFacts(name, problems=(str(error),))
    except Refused as reason:
        return ClassFacts(name, problems=(_refusal(name, str(reason)),))
    except Exception as error:  # the class is code that we did not write
        if "meta" in str(error):
            return ClassFacts(name, problems=(_refusal(name, _LOOKS_AT_VALUES),))
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return ClassFacts(name, problems=(f"{name} cannot be run without weights ({said}).",))


def _refusal(name: str, reason: str) -> str:
    return f"the architecture {name} is not supported: {reason}."


def _facts(name: str, request: ClassRequest) -> ClassFacts:
    kind = class_of(request)
    if not kind._supports_attention_backend:
        raise Refused("its class in transformers computes attention itself")
    if kind._is_stateful:
        raise Refused("its class keeps states that are no keys and values")
    config = config_of(request, kind)
    _check(config)
    calls = Calls()
    register(calls.attend, calls.compute_experts, _TRIAL)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(_TRIAL, calls.mask)
    with suppress(AttributeError):  # it reads positions, which have no values here; they are those of one text
        masking_utils.find_packed_sequence_indices = _one_text
    model = create(kind, config, torch.bfloat16, request.task, _TRIAL)
    if request.task != GENERATE:
        return read_text_class(name, model, calls, request.task)
    decoder, layer_calls = decoder_of(model), LayerCalls()
    calls.rotations.watch(model)
    layer_calls.watch(decoder)
    try:
        hidden = run(decoder)
    finally:
        calls.rotations.end()
        layer_calls.end()
    return _read(name, model, hidden, Reading(model, calls), layer_calls)


def _one_text(position_ids: torch.Tensor) -> None:
    """Says that the tokens of a step are one text."""


def _check(config: Any) -> None:
    """Refuses configs with which a class does something that shows in no call."""
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0):
        raise Refused("layers attend to the keys and values of other layers")
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):
        if isinstance(settings, dict) and settings.get("rope_type") in _LENGTH_DEPENDENT:
            original = settings.get("original_max_position_embeddings") or text.max_position_embeddings
            default = {"rope_type": "default", "rope_theta": settings.get("rope_theta", 10000.0)}
            override = msgspec.json.encode({"rope_parameters": default, "max_position_embeddings": original}).decode()
            raise Refused(
                f"its rotary embedding ({settings['rope_type']}) depends on the longest text of a step. Up to"
                f" {original} tokens it is the default one: --json-model-override-args '{override}'"
            )


def _read(name: str, model: Any, hidden: torch.Tensor, reading: Reading, layer_calls: LayerCalls) -> ClassFacts:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not torch.nn.Linear or not isinstance(embedding, torch.nn.Embedding):
        raise Refused("its embedding or its output head is no plain one")
    at_head, at_embedding = reading.names[id(head)], reading.names[id(embedding)]
    outside = [fact for fact in reading.outside if fact.name.rpartition(".")[0] not in (at_head, at_embedding)]
    decoder = decoder_of(model)
    at_decoder = f"{reading.names[id(decoder)]}.".removeprefix(".")
    encodes = hasattr(model.config, VISION)
    images = tuple(fact for fact in outside if encodes and not fact.name.startswith(at_decoder))
    tensors = tuple(fact for fact in outside if fact not in images)
    facts = ClassFacts(
        name,
        hidden_size=hidden.shape[-1],
        vocab_size=embedding.num_embeddings,
        layers_at=reading.layers_at,
        layers=tuple(map(reading.layer, range(len(reading.calls.attention)))),
        embedding=at_embedding,
        head=HeadFact(at_head, head.out_features, head.bias is not None, head.weight is embedding.weight),
        tensors=tensors,
        images=images,
        renamings=renamings(model),
        ignored=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        base=f"{model.base_model_prefix}.",
        stages=layer_calls.stages(decoder, hidden, at_decoder, tensors),
    )
    _check_head(model, head, embedding, hidden)
    return facts


def _check_head(model: Any, head: Any, embedding: Any, hidden: torch.Tensor) -> None:
    """Refuses a class whose logits do not follow from the decoder's output. Takes the decoder out of the model."""
    if not head.in_features == embedding.embedding_dim == hidden.shape[-1]:
        raise Refused("its embedding and its output head have rows of other widths than the decoder's output")
    if head.out_features != embedding.num_embeddings:
        raise Refused("its output head has another number of rows than its embedding")
    logits = Given(model, decoder_of(model)).logits(torch.empty_like(hidden[0]))
    if logits.shape != (TOKENS, head.out_features):
        raise Refused("its logits do not follow from the output of its decoder")


def main() -> None:
    """Reads a request from the input and writes the facts."""
    seconds, size = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    lower_limit(resource.RLIMIT_CPU, seconds)
    limit_memory(size)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ClassRequest)
    written = sys.stdout.buffer
    sys.stdout = sys.stderr  # classes print
    written.write(msgspec.json.encode(facts_of(request)))
    written.flush()


if __name__ == "__main__":
    main()
