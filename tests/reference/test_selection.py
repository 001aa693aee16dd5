"""The choice of blocks: visibility, scores, pooling, ties, and independence of how a prompt is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference import selection
from reference.compression import compress
from reference.numerics import MODEL, ORACLE
from reference.random import normal


def compressed(n: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """k1 and k2 of n keys of two heads."""
    keys = normal(seed, (n, 2, 128), scale=scale)
    return compress(keys, 32, 16, MODEL), compress(keys, 128, 64, MODEL)


def chosen(q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor, keys: int, total: int = 96, local: int = 32) -> Tensor:
    """`select_blocks` with the first block forced, in the model's roundings."""
    return selection.select_blocks(
        q, k1, k2, positions, keys, topk_total=total, local_blocks=local, init_blocks=1, precision=MODEL
    )


def test_a_compressed_key_is_seen_once_its_window_has_ended() -> None:
    for size, stride in ((32, 16), (128, 64)):
        p = torch.arange(400)
        wanted = [sum(stride * j + size - 1 <= x for j in range(400)) for x in range(400)]
        assert selection.visible(p, stride).tolist() == wanted
    assert int(selection.visible(torch.tensor(30), 16)) == 0 and int(selection.visible(torch.tensor(31), 16)) == 1
    assert int(selection.visible(torch.tensor(126), 64)) == 0 and int(selection.visible(torch.tensor(127), 64)) == 1


def test_the_end_effect_hides_one_key_at_some_lengths_only() -> None:
    p = torch.tensor([500])
    for n in range(501, 700):
        for stride in (16, 64):
            late = int(n % stride == stride - 1)
            assert int(selection.visible(p, stride, n)) == int(selection.visible(p, stride)) - late


def test_scores_are_exponentials_over_the_coarse_normaliser() -> None:
    k1, k2 = compressed(300, 2.0)
    q, p = normal(5, (1, 32, 128)), 250
    found = selection.scores(q, k1, k2, torch.tensor([p]), ORACLE)
    for group in range(2):
        for j in range(k1.shape[0]):
            total = 0.0
            for head in range(16 * group, 16 * group + 16):
                query = q[0, head].double() / 128**0.5
                coarse = sum((query @ k2[c, group].double()).exp() for c in range((p + 1) // 64 - 1))
                total += float((query @ k1[j, group].double()).exp() / coarse)
            wanted = total if j < (p + 1) // 16 - 1 else 0.0
            assert float(found[group, 0, j]) == pytest.approx(wanted, rel=1e-12)


def test_without_a_visible_coarse_key_scores_are_zero_and_not_nan() -> None:
    k1, k2 = compressed(200)
    found = selection.scores(normal(1, (3, 32, 128)), k1, k2, torch.tensor([0, 126, 127]), MODEL)
    assert bool((found[:, :2] == 0).all()) and bool((found[:, 2, :7] > 0).all())
    assert selection.scores(normal(1, (1, 32, 128)), k1[:0], k2[:0], torch.tensor([5]), MODEL).shape == (2, 1, 0)


def test_a_block_has_the_best_of_the_five_windows_that_touch_it() -> None:
    scores = normal(3, (2, 4, 101), dtype=torch.float32).abs().to(torch.bfloat16)
    positions = torch.tensor([1700, 1663, 1664, 900])
    pooled = selection.pool(scores, positions, 28, 1, 4)
    for i, p in enumerate(positions.tolist()):
        for b in range(28):
            part = scores[:, i, max(0, 4 * b - 1) : min(4 * b + 4, 101)]
            forced = b < 1 or p // 64 - 4 <= b <= p // 64
            wanted = torch.full((2,), torch.inf) if forced else torch.full((2,), -torch.inf)
            if not forced and part.shape[-1]:
                wanted = part.amax(-1).float()
            assert torch.equal(pooled[:, i, b].float(), wanted)


@pytest.mark.parametrize("p", [0, 63, 64, 2047, 6142, 6143])
def test_everything_is_chosen_while_there_is_room(p: int) -> None:
    k1, k2 = compressed(p + 1, 3.0)
    found = chosen(normal(p, (1, 32, 128)), k1, k2, torch.tensor([p]), p + 1)
    own = p // 64
    assert found[0, 0].tolist() == [*range(own + 1)] + [-1] * (95 - own)


def test_at_6144_one_of_97_blocks_is_left_out_and_33_window_blocks_are_in() -> None:
    k1, k2 = compressed(6145, 3.0)
    found = chosen(normal(9, (1, 32, 128)), k1, k2, torch.tensor([6144]), 6145)[0]
    for group in found.tolist():
        assert len(set(group)) == 96 and group == sorted(group)
        assert group[0] == 0 and group[-33:] == [*range(64, 97)]


def test_equal_scores_go_to_the_lower_blocks() -> None:
    k1, k2 = compressed(9000)
    found = chosen(torch.zeros(1, 32, 128, dtype=torch.bfloat16), k1, k2, torch.tensor([8999]), 9000)[0, 0].tolist()
    own = 8999 // 64
    assert found == [*range(63), *range(own - 32, own + 1)]


def test_infinite_scores_never_displace_the_window() -> None:
    scores = torch.full((2, 1, 600), torch.inf, dtype=torch.bfloat16)
    positions = torch.tensor([9650])
    found = selection.choose(selection.pool(scores, positions, 151, 1, 32), positions, 96)[0, 0].tolist()
    assert found == [*range(63), *range(150 - 32, 151)]


def test_settled_exact_scores_are_the_models() -> None:
    k1, k2 = compressed(2000, 4.0)
    q, positions = normal(2, (50, 32, 128)), torch.arange(1950, 2000)
    exact, model = (
        selection.block_scores(q, k1, k2, positions, 32, init_blocks=1, local_blocks=4, precision=precision)
        for precision in (ORACLE, MODEL)
    )
    assert torch.equal(selection.settle(exact), model)


def test_one_piece_pieces_and_tokens_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    n, first = 1500, 1380
    keys = normal(4, (n, 2, 128), scale=3.0)
    k1, k2 = compress(keys, 32, 16, MODEL), compress(keys, 128, 64, MODEL)
    q, positions = normal(6, (n - first, 32, 128)), torch.arange(first, n)
    whole = chosen(q, k1, k2, positions, n, 12, 4)
    scores = selection.scores(q, k1, k2, positions, MODEL)
    for p in range(first, n):
        own1, own2 = compress(keys[: p + 1], 32, 16, MODEL), compress(keys[: p + 1], 128, 64, MODEL)
        rows, at = slice(p - first, p - first + 1), torch.tensor([p])
        alone = selection.scores(q[rows], own1, own2, at, MODEL)
        assert torch.equal(alone, scores[:, rows, : own1.shape[0]])
        assert torch.equal(chosen(q[rows], own1, own2, at, p + 1, 12, 4), whole[rows])
    for size in (7, 64):
        parts = []
        for begin in range(first, n, size):
            end = min(begin + size, n)
            rows = slice(begin - first, end - first)
            own1, own2 = compress(keys[:end], 32, 16, MODEL), compress(keys[:end], 128, 64, MODEL)
            parts.append(chosen(q[rows], own1, own2, positions[rows], end, 12, 4))
        assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(selection, "_CHUNK", 1 << 14)
    assert torch.equal(chosen(q, k1, k2, positions, n, 12, 4), whole)
