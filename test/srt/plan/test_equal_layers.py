"""Equal layers of a description are one object, for which everything is computed once."""

from __future__ import annotations

import pytest

from sglang.srt.plan.equal_layers import distinct, interned, of_each
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK
from srt.kernels.published import configs


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B-v0.1"])
def test_a_description_has_an_object_for_each_kind_of_layer(name: str) -> None:
    model = describe_model(configs()[name], None)
    assert len(model.layers) > 30
    assert len(distinct(model.layers)) == len(set(model.layers)) == 1
    assert len({id(weights) for weights in rank_weights(model, ONE_RANK).layers}) == 1


def test_results_come_in_the_order_of_the_layers_and_are_computed_once() -> None:
    first, second, again = (describe_model(configs()["Meta-Llama-3.1-8B"], None).layers[0] for _ in range(3))
    other = LayerSpec(first.mixer, second.ffn, tail=1)
    layers = interned([first, other, second, other, again])
    computed = []

    def tail(layer: LayerSpec) -> int:
        computed.append(layer)
        return layer.tail

    assert list(of_each(layers, tail)) == [0, 1, 0, 1, 0]
    assert computed == [first, other] == distinct(layers)
