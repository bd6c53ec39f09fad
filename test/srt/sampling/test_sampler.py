"""The sampler's torch path: every parameter against the reference, distributions, reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.layers.sampler import Sampler, filter_thresholds
from sglang.srt.sampling.noise import gumbel_noise
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_table import Column, SamplingTable
from srt.sampling.reference import adjusted_logits, distribution, pack_mask

VOCAB = 67
PROMPT = [3, 9, 9, 40]
STOPS = (5, 6)
VARIANTS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=5),
    "top_k_1": SamplingParams(top_k=1),
    "top_k_beyond": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.6),
    "top_p_tiny": SamplingParams(top_p=1e-6),
    "top_k_p": SamplingParams(top_k=9, top_p=0.7, temperature=1.7),
    "min_p": SamplingParams(min_p=0.2),
    "min_p_1": SamplingParams(min_p=1.0),
    "all_filters": SamplingParams(top_k=20, top_p=0.9, min_p=0.05, temperature=1.4),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "repetition_reward": SamplingParams(repetition_penalty=0.6),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "presence": SamplingParams(presence_penalty=-1.5),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.7, top_k=30),
    "bias": SamplingParams(logit_bias={"0": 4.0, "66": -100.0, "9": 2.5}),
    "min_new": SamplingParams(min_new_tokens=3, logit_bias={"5": 8.0}),
    "greedy_penalties": SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={"11": 5.0}),
}


def table_of(params: list[SamplingParams], output_ids: list[int], seeds: list[int] | None = None) -> SamplingTable:
    """Request i in slot i + 1."""
    table = SamplingTable(len(params) + 1, VOCAB, "cpu")
    for i, p in enumerate(params):
        table.set(i + 1, p, 1000 + i if seeds is None else seeds[i], PROMPT, output_ids, STOPS)
    return table


def sample(
    table: SamplingTable, slots: list[int], logits: torch.Tensor, position: int, mask: np.ndarray | None = None
) -> list[int]:
    batch = table.view(np.array(slots), torch.tensor(slots))
    positions = torch.full((len(slots),), position)
    vocab_mask = None if mask is None else torch.from_numpy(mask)
    return Sampler(use_triton=False)(logits.clone(), batch, positions, vocab_mask).next_token_ids.tolist()


def rows_of_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def assert_drawn_from(tokens: list[int], probabilities: np.ndarray) -> None:
    """Chi-square with a bound that a right sampler exceeds once in about 10^5 seeds (the seeds here are fixed)."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a filtered token was drawn"
    expected = probabilities * len(tokens)
    frequent = expected >= 5
    rare = (expected > 0) & ~frequent
    observed = np.append(counts[frequent], counts[rare].sum())
    wanted = np.append(expected[frequent], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi = ((observed - wanted) ** 2 / wanted).sum()
    assert chi <= freedom + 4.5 * (2 * freedom) ** 0.5 + 10, f"chi-square {chi:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("output_ids", [[], [7, 7, 9, 11, 11, 11]], ids=["start", "later"])
def test_each_parameter_gives_the_reference_distribution(name: str, output_ids: list[int]) -> None:
    params, draws = VARIANTS[name], 1000
    logits = rows_of_logits(1, seed=len(name))
    expected = distribution(adjusted_logits(logits[0].numpy(), params, PROMPT, output_ids, STOPS), params)
    table = table_of([params] * draws, output_ids, seeds=[7919 * i for i in range(draws)])
    position = len(PROMPT) + len(output_ids)
    tokens = sample(table, list(range(1, draws + 1)), logits.repeat(draws, 1), position)
    assert_drawn_from(tokens, expected)


def test_grammar_mask_with_and_without_penalties() -> None:
    allowed = [{1, 2, 40}, None, {33}]
    params = [SamplingParams(), SamplingParams(top_k=3), VARIANTS["penalties"]]
    logits = rows_of_logits(3)
    for step in range(50):
        table = table_of(params, [7, 7], seeds=[step, step, step])
        tokens = sample(table, [1, 2, 3], logits, 6, pack_mask(allowed, VOCAB))
        for token, row, p, ids in zip(tokens, logits.numpy(), params, allowed, strict=True):
            assert distribution(adjusted_logits(row, p, PROMPT, [7, 7], STOPS, ids), p)[token] > 0


def test_a_request_samples_the_same_among_any_batch_mates() -> None:
    names = list(VARIANTS)
    params = [VARIANTS[name] for name in names]
    logits = rows_of_logits(len(names))
    together = sample(table_of(params, [7, 9]), list(range(1, len(names) + 1)), logits, 6)
    order = np.random.default_rng(0).permutation(len(names))
    shuffled = sample(table_of(params, [7, 9]), [int(i) + 1 for i in order], logits[torch.from_numpy(order)], 6)
    assert shuffled == [together[i] for i in order]
    for i in range(len(names)):
        assert sample(table_of(params, [7, 9]), [i + 1], logits[i : i + 1], 6) == [together[i]], names[i]


def test_seeds_and_positions_decide() -> None:
    logits = torch.zeros(1, VOCAB)

    def draw(seed: int, position: int) -> int:
        return sample(table_of([SamplingParams()], [], seeds=[seed]), [1], logits, position)[0]

    assert [draw(5, p) for p in range(4, 12)] == [draw(5, p) for p in range(4, 12)]
    assert len({draw(5, p) for p in range(4, 36)}) > 10
    assert len({draw(s, 4) for s in range(32)}) > 10
    assert len({draw(s << 32, 4) for s in range(32)}) > 10, "the upper half of the seed counts"
    draw(-1, 4), draw(2**63 - 1, 4)


def test_tokens_of_known_seeds_never_change() -> None:
    """The hash is part of what `sampling_seed` promises: a change would alter users' reproducible outputs."""
    seeds = torch.tensor([0, 1, 42])
    noise = gumbel_noise(seeds, torch.tensor([0, 0, 7]), torch.tensor([10, 10, 99]), 1000)
    assert noise.argmax(dim=1).tolist() == [929, 481, 503]
    expected = torch.tensor([[-0.0525, 0.1744, 1.0998], [-0.6936, -0.6871, 2.8832], [0.3358, -0.7099, 0.5947]])
    torch.testing.assert_close(noise[:, :3], expected, rtol=0, atol=1e-4)


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    rows, vocab = 200, 5000
    seeds = torch.arange(rows)
    noise = gumbel_noise(seeds, torch.zeros(rows), torch.full((rows,), 17), vocab).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.005
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08
    assert np.corrcoef(noise[:, :-1].flatten(), noise[:, 1:].flatten())[0, 1] < 0.005
    winners = noise.argmax(dim=1)
    assert len(winners.unique()) > rows * 0.9


def test_penalty_counts_follow_the_sampled_tokens() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    table = table_of([params, SamplingParams(temperature=0.0)], [])
    logits = torch.zeros(2, VOCAB)
    logits[:, 8], logits[:, 2] = 2.5, 1.0
    output: list[int] = []
    for step in range(6):
        first, second = sample(table, [1, 2], logits, 4 + step)
        reference = adjusted_logits(logits[0].numpy(), params, PROMPT, output, STOPS)
        assert first == int(reference.argmax())
        assert second == 8
        output.append(first)
    assert output == [8, 8, 2, 8, 0, 1], "2.5, 1.5, 1, 0.5, then zeros in turn"


def test_a_resumed_request_continues_with_its_counts() -> None:
    params = [SamplingParams(presence_penalty=1.0, repetition_penalty=1.3)]
    logits = rows_of_logits(1)
    table, output = table_of(params, []), []
    for step in range(8):
        output += sample(table, [1], logits, 4 + step)
    resumed, again = table_of(params, output[:4]), output[:4]
    for step in range(4, 8):
        again += sample(resumed, [1], logits, 4 + step)
    assert again == output


def test_penalty_rows_are_reused_and_clean() -> None:
    table = SamplingTable(40, VOCAB, "cpu")
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    for round_ in range(3):
        for slot in range(1, 40):
            table.set(slot, params, 0, [], [slot, 3], ())
        table.view(np.arange(40), torch.arange(40))
        assert table.penalties.state.shape[0] <= 64
        rows = table.table[1:, Column.PENALTY_ROW].long()
        assert len(rows.unique()) == 39 and (rows > 0).all()
        counted = (table.penalties.state[rows] > 0).sum(dim=1)
        assert counted.tolist() == [1 if slot == 3 else 2 for slot in range(1, 40)], round_
        for slot in range(1, 40):
            table.clear(slot)
    assert not table.view(np.arange(40), torch.arange(40)).penalties


def test_filters_keep_exactly_the_reference_set() -> None:
    generator = np.random.default_rng(3)
    params = [
        SamplingParams(
            temperature=float(generator.uniform(0.2, 3)),
            top_k=int(generator.choice([-1, 1 + generator.integers(1, 80)])),
            top_p=float(generator.choice([1.0, generator.uniform(0.05, 0.999)])),
            min_p=float(generator.choice([0.0, generator.uniform(0, 0.5)])),
        )
        for _ in range(60)
    ]
    logits = rows_of_logits(60, seed=9)
    table = table_of(params, [])
    slots = torch.arange(1, 61)
    for group in (slots, slots[:7], slots[11:12]):
        batch = table.view(group.numpy(), group)
        kept = logits[group - 1] >= filter_thresholds(logits[group - 1], batch, batch.rows())[:, None]
        for row, slot in enumerate(group.tolist()):
            expected = distribution(logits[slot - 1].numpy().astype(np.float64), params[slot - 1]) > 0
            assert kept[row].tolist() == expected.tolist(), params[slot - 1]


def test_ties_with_the_last_kept_logit_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_k=2, top_p=0.95)):
        table = SamplingTable(2, 5, "cpu")
        table.set(1, params, 0, [], [], ())
        batch = table.view(np.array([1]), torch.tensor([1]))
        assert filter_thresholds(logits, batch, batch.rows()).tolist() == [1.0]


def test_flags_follow_the_batch() -> None:
    table = table_of(
        [VARIANTS["greedy"], VARIANTS["plain"], VARIANTS["top_k"], VARIANTS["bias"], VARIANTS["penalties"]], []
    )

    def view(*slots: int):
        return table.view(np.array(slots, dtype=np.int64), torch.tensor(slots, dtype=torch.int64))

    assert view(1).all_greedy and not view(1).any_filter and view(1).sparse is None
    assert not view(1, 2).all_greedy and not view(1, 2).any_filter
    assert view(2, 3).any_top_k and view(2, 3).max_top_k == 5
    assert view(3, 4).sparse is not None and view(3, 4).penalties is None
    assert view(5).penalties is not None
    assert view(0).all_greedy, "the padding slot"
    assert view().all_greedy
    table.clear(3)
    assert not view(3).any_top_k
    table.set(3, VARIANTS["bias"], 1, [], [], ())
    assert view(3, 4).sparse.packed.shape[1] == 2 * view(4).sparse.packed.shape[1]


def test_bias_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match=f"token {VOCAB}, but the vocabulary has {VOCAB} tokens"):
        table_of([SamplingParams(logit_bias={str(VOCAB): 1.0})], [])


def test_next_token_table_is_written() -> None:
    table = table_of([SamplingParams(), SamplingParams(temperature=0.0)], [])
    next_token = torch.full((3,), -1)
    slots = torch.tensor([2, 1])
    out = Sampler(use_triton=False)(
        rows_of_logits(2), table.view(slots.numpy(), slots), torch.tensor([4, 4]), next_token=next_token
    )
    assert next_token.tolist() == [-1, out.next_token_ids[1], out.next_token_ids[0]]


def test_warm_up_leaves_the_padding_slot_greedy_and_clean() -> None:
    table, next_token = table_of([VARIANTS["plain"]], []), torch.zeros(2, dtype=torch.int64)
    Sampler(use_triton=False).warm_up(table, next_token)
    batch = table.view(np.array([0]), torch.tensor([0]))
    assert batch.all_greedy and batch.penalties is None and batch.sparse is None
    assert table.table[0, Column.PENALTY_ROW] == 0 and not next_token.any()
