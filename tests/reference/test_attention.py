"""The law of attention, held against the naive formula and against itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference import attention
from reference.attention import attend_blocks, attend_dense, output_gate
from reference.numerics import MODEL, ORACLE
from reference.random import normal, stream_key


def _draw(name: str, *shape: int, scale: float = 1.0) -> Tensor:
    return normal(stream_key("test_attention", name), shape, scale=scale)


def _naive(q: Tensor, keys: Tensor, values: Tensor, seen: list[list[int]]) -> Tensor:
    """One query [H, D] over the keys `seen` [KV] lists of indices, a head at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // keys.shape[1])
        index = seen[kv_head]
        weights = torch.softmax(keys[index, kv_head].double() @ q[head].double() / math.sqrt(q.shape[1]), 0)
        out[head] = weights @ values[index, kv_head].double()
    return out


def _all_blocks(positions: Tensor, kv_heads: int, width: int) -> Tensor:
    blocks = torch.arange(width, dtype=torch.int32).expand(len(positions), kv_heads, width).clone()
    blocks[blocks > (positions // 64)[:, None, None]] = -1
    return blocks


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_dense_is_softmax_over_all_keys_up_to_the_query(length: int) -> None:
    q, keys, values = _draw("q", length, 4, 16), _draw("k", length, 2, 16), _draw("v", length, 2, 16)
    got = attend_dense(q, keys, values, torch.arange(length), ORACLE)
    for position in {0, length // 2, length - 1}:
        want = _naive(q[position], keys, values, [list(range(position + 1))] * 2)
        torch.testing.assert_close(got[position], want, rtol=1e-12, atol=1e-12)


def test_blocks_are_softmax_over_the_chosen_keys() -> None:
    q, keys, values = _draw("q", 3, 4, 16), _draw("k", 300, 2, 16), _draw("v", 300, 2, 16)
    positions = torch.tensor([130, 299, 64])
    blocks = torch.tensor(
        [[[0, 2, -1], [1, 2, -1]], [[1, 3, 4], [0, 2, 4]], [[1, -1, -1], [0, 1, -1]]], dtype=torch.int32
    )
    got = attend_blocks(q, keys, values, blocks, positions, ORACLE)
    for row, position in enumerate(positions.tolist()):
        seen = [
            [
                key
                for block in blocks[row, kv].tolist()
                if block >= 0
                for key in range(64 * block, 64 * block + 64)
                if key <= position
            ]
            for kv in range(2)
        ]
        torch.testing.assert_close(got[row], _naive(q[row], keys, values, seen), rtol=1e-12, atol=1e-12)


def test_all_blocks_chosen_is_dense() -> None:
    q, keys, values = _draw("q", 40, 32, 128), _draw("k", 260, 2, 128), _draw("v", 260, 2, 128)
    positions = torch.arange(220, 260)
    blocks = _all_blocks(positions, 2, 8)
    sparse = attend_blocks(q, keys, values, blocks, positions, MODEL)
    assert torch.equal(sparse, attend_dense(q, keys, values, positions, MODEL))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_bits_do_not_depend_on_how_many_queries_go_together(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = _draw("q", 50, 32, 128, scale=scale), _draw("k", 300, 2, 128), _draw("v", 300, 2, 128)
    positions = torch.arange(250, 300)
    blocks = _all_blocks(positions, 2, 5)
    whole = attend_dense(q, keys, values, positions, MODEL), attend_blocks(q, keys, values, blocks, positions, MODEL)
    for index in range(0, 50, 7):
        row = slice(index, index + 1)
        assert torch.equal(
            whole[0][row], attend_dense(q[row], keys[: 251 + index], values[: 251 + index], positions[row], MODEL)
        )
        assert torch.equal(whole[1][row], attend_blocks(q[row], keys, values, blocks[row], positions[row], MODEL))
    monkeypatch.setattr(attention, "_KEY_PIECE", 96)
    monkeypatch.setattr(attention, "_budget", lambda device: 1 << 12)
    assert torch.equal(whole[0], attend_dense(q, keys, values, positions, MODEL))
    assert torch.equal(whole[1], attend_blocks(q, keys, values, blocks, positions, MODEL))


def test_what_is_not_chosen_or_past_the_query_is_never_read() -> None:
    q, keys, values = _draw("q", 1, 4, 16), _draw("k", 256, 2, 16), _draw("v", 256, 2, 16)
    blocks = torch.tensor([[[1, 2, -1], [1, 2, -1]]], dtype=torch.int32)
    positions = torch.tensor([150])
    want = attend_blocks(q, keys, values, blocks, positions, MODEL)
    for tensor in (keys, values):
        tensor[:64] = float("nan")
        tensor[151:] = float("nan")
    assert torch.equal(want, attend_blocks(q, keys, values, blocks, positions, MODEL))


def test_a_row_without_keys_is_zero() -> None:
    q, keys, values = _draw("q", 1, 4, 16), _draw("k", 64, 2, 16), _draw("v", 64, 2, 16)
    blocks = torch.full((1, 2, 2), -1, dtype=torch.int32)
    assert not attend_blocks(q, keys, values, blocks, torch.tensor([10]), MODEL).any()


def test_large_logits_stay_finite_and_pick_the_largest() -> None:
    q, keys, values = _draw("q", 1, 4, 16, scale=200.0), _draw("k", 64, 2, 16, scale=50.0), _draw("v", 64, 2, 16)
    got = attend_dense(q, keys, values, torch.tensor([63]), MODEL)
    assert torch.isfinite(got).all()
    best = (keys[:, 0].double() @ q[0, 0].double()).argmax()
    torch.testing.assert_close(got[0, 0], values[best, 0])


def test_gate_rounds_sigmoid_and_product() -> None:
    attended, gate = _draw("o", 5, 64), _draw("gate", 5, 64, scale=4.0)
    assert torch.equal(output_gate(attended, gate, MODEL), attended * torch.sigmoid(gate))
    want = attended.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(output_gate(attended, gate, ORACLE), want, rtol=1e-14, atol=0)
