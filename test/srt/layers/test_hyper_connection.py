"""Hyper-connections: the kernels against plain torch in fp64, interpreted here and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.blocks.hyper_connections import reference as hyper_native
from sglang.srt.blocks.hyper_connections.kernels import hyper_connection as kernels

DEVICE = interpreter.DEVICE
EPS, MIX_EPS, ROUNDS = 1e-6, 1e-6, 20


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def problem(
    num_tokens: int, streams: int, size: int, last: bool = False, apart: bool = False
) -> dict[str, torch.Tensor]:
    """A join whose logits are of the size of 1: of the middle of a model, or behind its last layer. `apart`: streams do
    not mix."""
    pieces = (streams, streams, *([] if apart else [streams**2]))[: 1 if last else 3]
    outputs = sum(pieces)
    made = {
        "streams": torch.randn(num_tokens, streams, size).bfloat16(),
        "out": torch.randn(num_tokens, size).bfloat16(),
        "placement": torch.rand(num_tokens, streams + (0 if apart else streams * streams)),
        "matrix": torch.randn(outputs, streams * size) / (streams * size) ** 0.5,
        "base": torch.randn(outputs),
        "scale": 2.0 * torch.randn(len(pieces)),
        "weight": (1 + 0.1 * torch.randn(size)).bfloat16(),
    }
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


def joined(op, given: dict[str, torch.Tensor], rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    return op(*given.values(), EPS, MIX_EPS, rounds)


def exact(given: dict[str, torch.Tensor], rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """In fp64, but for what is kept in the model's type: the streams, which the next products read, and the inputs."""
    wide = {name: None if tensor is None else tensor.double() for name, tensor in given.items()}
    streams = wide["streams"]
    if given["out"] is not None:
        streams = hyper_native.placed(streams, wide["out"], wide["placement"]).bfloat16().double()
    wide |= {"streams": streams, "out": None, "placement": None}
    return joined(hyper_native.hyper_connection, wide, rounds)


def check(given: dict[str, torch.Tensor], rounds: int = ROUNDS) -> None:
    before = given["streams"].clone()
    streams, x, placement = joined(kernels.hyper_connection, given, rounds)
    assert torch.equal(given["streams"], before), "what a replay reads is as it was"
    if given["out"] is None:
        assert streams is given["streams"]
        want = exact(given, rounds)
    else:
        # A sum on the edge between two numbers of 16 bits may be rounded to either; products are of what was stored.
        mixed = hyper_native.placed(given["streams"].double(), given["out"].double(), given["placement"].double())
        torch.testing.assert_close(streams.double(), mixed, rtol=2**-8, atol=1e-6)
        want = exact(given | {"streams": streams, "out": None, "placement": None}, rounds)
    # What a sum in fp32 is off by grows with the root of its length; `scale` multiplies it, and then it is an exponent.
    terms = given["streams"][0].numel() if len(streams) else 1
    # Hopper's matrix unit cuts digits off, which adds up where a part of the columns has more than one block.
    unit = 5e-5 if len(streams) <= kernels.FEW_TOKENS else 1e-4
    rtol = unit * max(1.0, float(given["scale"].abs().max()) * (terms / 4096) ** 0.5)
    torch.testing.assert_close(placement.double(), want[2].double(), rtol=rtol, atol=rtol / 10)
    torch.testing.assert_close(x.double(), want[1], rtol=2**-7, atol=2**-8)
    num = given["streams"].shape[1]
    if placement.shape[1] > num:
        mix = placement[:, num:].unflatten(1, (num, num))
        torch.testing.assert_close(mix.sum(1), torch.ones_like(mix.sum(1)), rtol=0.0, atol=1e-4)


@interpreter.kernel_test
@pytest.mark.parametrize(("num_tokens", "size", "first"), [(1, 4096, False), (17, 256, True), (61, 1024, False)])
def test_streams_that_do_not_mix(num_tokens: int, size: int, first: bool, small_steps: None) -> None:
    given = problem(num_tokens, 4, size, apart=True)
    check(given | {"out": None, "placement": None} if first else given)
    check(problem(num_tokens, 4, size, last=True, apart=True))


@interpreter.kernel_test
def test_a_magnitude_limits_the_weights_of_an_output() -> None:
    given, epsilon = problem(3, 4, 64, apart=True), 1e-2
    for op in (hyper_native.hyper_connection, kernels.hyper_connection):
        two, three = (op(*given.values(), EPS, epsilon, 0, False, limit)[2] for limit in (2.0, 3.0))
        torch.testing.assert_close((two - epsilon) * 1.5, three - epsilon, rtol=1e-4, atol=1e-6)
        assert (two > epsilon).all() and (two < 2.0 + epsilon).all()


@interpreter.kernel_test
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4096), (17, 256), (40, 64), (41, 320), (45, 512), (61, 1024)])
def test_a_join_in_the_middle(num_tokens: int, size: int, small_steps: None) -> None:
    """A published width for a single token; both tiles, every number of parts, and ends that no block divides."""
    check(problem(num_tokens, 4, size))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 41 tokens and of 61 are computed as long ones are: each token takes the interpreter milliseconds."""
    monkeypatch.setattr(kernels, "FEW_TOKENS", 40)
    monkeypatch.setattr(kernels, "SPLITS_UP_TO", ((43, 64), (60, 16), (1 << 62, 8)))


@interpreter.kernel_test
@pytest.mark.parametrize("num_tokens", [2, 45])
@pytest.mark.parametrize("last", [False, True])
def test_the_first_join_and_the_last(num_tokens: int, last: bool, small_steps: None) -> None:
    given = problem(num_tokens, 4, 160, last)
    if not last:
        given |= {"out": None, "placement": None}
    check(given)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("num_tokens", "streams", "rounds"), [(5, 2, 2), (5, 8, 20), (5, 4, 1), (41, 2, 1), (44, 8, 2)]
)
def test_other_streams_and_rounds(num_tokens: int, streams: int, rounds: int, small_steps: None) -> None:
    given = problem(num_tokens, streams, 48)
    streams_out, x, placement = joined(kernels.hyper_connection, given, rounds)
    want = exact(given | {"streams": streams_out, "out": None, "placement": None}, rounds)
    torch.testing.assert_close(placement.double(), want[2], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(x.double(), want[1], rtol=2**-7, atol=2**-8)


@interpreter.kernel_test
@pytest.mark.parametrize("num_tokens", [3, 45])
@pytest.mark.parametrize("before", ["nothing", "weights alone", "a block"])
def test_weights_of_the_block_before(num_tokens: int, before: str, small_steps: None) -> None:
    """Lagged: before the first block, behind embeddings of n-grams, and between two blocks. This block's weights are
    those that the kernel without a lag mixes the streams by."""
    num, given = 4, problem(num_tokens, 4, 160)
    given["placement"] = torch.rand(num_tokens, num * (num + 2), device=DEVICE)
    given |= {} if before == "a block" else {"out": None}
    given |= {"placement": None} if before == "nothing" else {}
    results = []
    for op in (kernels.hyper_connection, hyper_native.hyper_connection):
        results.append(op(*given.values(), EPS, MIX_EPS, ROUNDS, True))
    (streams, x, placement), (want_streams, want_x, want_placement) = results
    torch.testing.assert_close(streams.float(), want_streams.float(), rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(x.float(), want_x.float(), rtol=2**-6, atol=2**-6)
    assert placement.shape == (num_tokens, num * (num + 2))
    torch.testing.assert_close(placement, want_placement, rtol=2e-2, atol=2e-2)
    usual = given if before == "a block" else given | {"placement": None}
    _, _, without_lag = joined(kernels.hyper_connection, usual)
    torch.testing.assert_close(placement[:, : num + num * num], without_lag, rtol=1e-6, atol=1e-6)


@interpreter.kernel_test
def test_digits_of_the_matrix_are_kept() -> None:
    """Numbers that cancel: what is left of them lies below the digits of bfloat16, and of twice bfloat16."""
    given = problem(16, 4, 128)
    given["streams"].copy_(torch.ones(16, 4, 128))
    given["matrix"][:, ::2] = 1000.0
    given["matrix"][:, 1::2] = -1000.0
    given["matrix"] += (torch.arange(512) * 1e-4).to(DEVICE)
    check(given | {"out": None, "placement": None})


@interpreter.kernel_test
def test_a_token_does_not_depend_on_the_others() -> None:
    """Bit by bit on a GPU, within a way of computing."""
    given = problem(40, 4, 128)
    streams, x, placement = joined(kernels.hyper_connection, given)
    some = given | {name: given[name][7:9].clone() for name in ("streams", "out", "placement")}
    for got, want in zip(joined(kernels.hyper_connection, some), (streams, x, placement), strict=True):
        torch.testing.assert_close(got, want[7:9], **interpreter.SAME_BITS)


@interpreter.kernel_test
def test_no_tokens() -> None:
    streams, x, placement = joined(kernels.hyper_connection, problem(0, 4, 64))
    assert streams.shape == (0, 4, 64) and x.shape == (0, 64) and placement.shape == (0, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 256, 257, 8192])
@pytest.mark.parametrize("size", [4096, 7168])
@pytest.mark.parametrize("last", [False, True])
def test_published_widths(num_tokens: int, size: int, last: bool) -> None:
    check(problem(num_tokens, 4, size, last))


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
