"""Sampling: published random numbers, filters on small vocabularies by hand, and the distribution it draws from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference import sampling
from reference.numerics import MODEL, ORACLE
from reference.random import normal


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of Random123's philox4x32, 10 rounds
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: str) -> None:
    c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
    k0, k1 = (torch.tensor(k) for k in key)
    got = sampling.philox((c0, c1, c2, c3), (k0, k1))
    assert [f"{int(word):08x}" for word in got] == words.split()


def test_gumbel_takes_every_word_of_seed_and_step() -> None:
    seeds = torch.tensor([-5, 1 << 40, 3])
    steps = torch.tensor([(1 << 33) + 7, 0, -1])
    noise = sampling.gumbel(seeds, steps, 4)
    for row, (seed, step) in enumerate(zip(seeds.tolist(), steps.tolist())):
        for token in range(4):
            counter = (token, step & 0xFFFFFFFF, step >> 32 & 0xFFFFFFFF, 0)
            key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
            c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
            word = int(sampling.philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))[0])
            expected = -math.log(-math.log((word + 0.5) / 2**32))
            assert float(noise[row, token]) == pytest.approx(expected, rel=1e-12)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-math.inf, -5.0, -7.0, -5.0], [0.0, -0.0, 0.0, -1.0]])
    assert sampling.greedy(logits).tolist() == [1, 1, 0]
    assert sampling.greedy(logits.to(torch.bfloat16)).dtype is torch.int32


def kept(probabilities: list[float], top_k: int, top_p: float) -> list[int]:
    scaled = torch.tensor([probabilities]).double().log()
    order = sampling.candidates(scaled, torch.tensor([top_k]), torch.tensor([top_p]))
    return sorted(order.ids[order.allowed].tolist())


def test_filters_by_hand() -> None:
    halves = [0.125, 0.5, 0.25, 0.0625, 0.0625]
    assert kept(halves, 0, 1.0) == [0, 1, 2, 3, 4]
    assert kept(halves, 2, 1.0) == [1, 2]
    assert kept(halves, 99, 1.0) == [0, 1, 2, 3, 4]
    assert kept(halves, 0, 0.7) == [1, 2]  # 0.5 does not reach it, so the token that crosses stays
    assert kept(halves, 0, 1e-9) == [1]
    assert kept(halves, 4, 1.0) == [0, 1, 2, 3]  # a tie at the fourth: the lower id
    assert kept(halves, 0, 0.9) == [0, 1, 2, 3]  # 0.875 does not reach it; a tie: the lower id
    assert kept(halves, 2, 0.6) == [1]  # renormalised, the first has two thirds
    assert kept(halves, 3, 0.6) == [1, 2]


def draw(logits: Tensor, rows: int, **settings: float) -> Tensor:
    """Tokens of `rows` steps at the same logits."""
    return sampling.sample(
        logits.expand(rows, -1),
        torch.full((rows,), settings.get("temperature", 1.0)),
        torch.full((rows,), int(settings.get("top_k", 0)), dtype=torch.int32),
        torch.full((rows,), settings.get("top_p", 1.0)),
        torch.full((rows,), 1234),
        torch.arange(rows),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 3, "top_p": 0.75}, [0, 0, 3 / 7, 4 / 7]),
    ],
)
def test_draws_follow_the_filtered_softmax(settings: dict[str, float], expected: list[float]) -> None:
    rows = 20000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    share = torch.bincount(draw(logits, rows, **settings), minlength=4) / rows
    for got, p in zip(share.tolist(), expected):
        assert abs(got - p) <= 5 * math.sqrt(p * (1 - p) / rows)


def test_rows_are_independent_and_padding_is_marked() -> None:
    rows = 9
    logits = normal(3, (rows, 500), scale=2.0)
    temperature = torch.tensor([0.0, 1.0, -1.0] * 3)
    top_k, top_p = torch.arange(rows).to(torch.int32), torch.linspace(0.2, 1.0, rows)
    seed, step = torch.arange(rows) * (1 << 35) - 3, torch.arange(rows) + (1 << 32)
    args = (logits, temperature, top_k, top_p, seed, step)
    tokens = sampling.sample(*args, precision=MODEL)
    assert tokens.dtype is torch.int32
    assert tokens[2::3].tolist() == [-1] * 3
    assert tokens[::3].equal(sampling.greedy(logits)[::3])
    assert tokens.equal(sampling.sample(*args, precision=ORACLE))
    for row in range(rows):
        one = slice(row, row + 1)
        alone = sampling.sample(logits[one], temperature[one], top_k[one], top_p[one], seed[one], step[one], MODEL)
        assert alone.equal(tokens[one])
