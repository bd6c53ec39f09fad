from __future__ import annotations

import pytest

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.hardware.common_traits import common_traits
from sglang.srt.hardware.products import PRODUCTS


@pytest.mark.parametrize("swapped", [False, True])
def test_cards_of_one_architecture_have_the_least_of_each_in_common(swapped: bool) -> None:
    server, rtx_5090 = arch_by_name("rtx-pro-6000-server"), arch_by_name("rtx-5090")
    common = common_traits([rtx_5090, server] if swapped else [server, rtx_5090])
    assert (common.num_sms, common.memory, common.bandwidth) == (170, PRODUCTS["rtx-5090"].memory, server.bandwidth)
    assert common.product == "rtx-5090" and common.features == server.features & rtx_5090.features


def test_one_card_is_as_it_is() -> None:
    for product in PRODUCTS:
        assert common_traits([arch_by_name(product)] * 3) == arch_by_name(product)
