"""Counter-based random numbers: the same bits on every device and in every order of making.

Element i of a stream is a hash (SplitMix64's finaliser, Steele et al. 2014) of the stream's key and i,
so a tensor can be made in pieces, backwards, or on another device. Only integer arithmetic and
float32 products of exact values are used: nothing depends on a device's elementary functions.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def stream_key(*parts: object) -> int:
    """Key of a stream, a signed 64-bit integer, from anything with a stable `str` (seed, tensor's name)."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _words(key: int, start: int, count: int, device: torch.device | str) -> Tensor:
    """64 random bits for each of the elements start … start+count−1, as int64 [count]."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x.mul_(_GAMMA).add_(key)
    x ^= _shift(x, 30)
    x.mul_(_MIX1)
    x ^= _shift(x, 27)
    x.mul_(_MIX2)
    x ^= _shift(x, 31)
    return x


def integers(
    key: int, shape: tuple[int, ...], high: int, *, device: torch.device | str = "cpu", start: int = 0
) -> Tensor:
    """Uniform integers 0 … high−1 (high ≤ 2^31), int64 of `shape`; bias below 2^−31."""
    count = math.prod(shape)
    return (_shift(_words(key, start, count, device), 32) % high).reshape(shape)


def normal(
    key: int,
    shape: tuple[int, ...],
    *,
    scale: float = 1.0,
    offset: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    chunk: int | None = None,
) -> Tensor:
    """Nearly Gaussian numbers `offset + scale·z` of `shape` and `dtype`.

    z is the centred, scaled sum of the eight bytes of a 64-bit hash (Irwin–Hall): mean 0, variance 1,
    |z| ≤ 4.9, exact in float32. Products and sums are float32, then one rounding to `dtype`.
    `chunk` elements are made at a time (8 bytes of scratch each, a few times over); left out, what suits the
    device: 2^26 on a GPU, 2^16 elsewhere, where scratch that stays in the processor's cache is eight times faster.
    """
    count = math.prod(shape)
    chunk = chunk or (1 << 26 if torch.device(device).type == "cuda" else 1 << 16)
    out = torch.empty(count, dtype=dtype, device=device)
    mask = 0x00FF00FF00FF00FF
    unit = torch.tensor(scale / math.sqrt(8 * (65536 - 1) / 12.0), dtype=torch.float32, device=device)
    shift = torch.tensor(offset, dtype=torch.float32, device=device)
    for start in range(0, count, chunk):
        size = min(chunk, count - start)
        words = _words(key, start, size, device)
        pairs = (words & mask) + (_shift(words, 8) & mask)
        total = (pairs & 0xFFFF) + (_shift(pairs, 16) & 0xFFFF) + (_shift(pairs, 32) & 0xFFFF) + _shift(pairs, 48)
        out[start : start + size] = ((total - 1020).to(torch.float32) * unit + shift).to(dtype)
    return out.reshape(shape)
