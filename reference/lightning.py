"""Lightning attention: a linear recurrence with one constant decay a head (Qin et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import rms_norm
from .numerics import Precision, bf16, f32, mul_bf16, sigmoid_bf16
from .rope import apply_rope


def slopes(heads: int) -> Tensor:
    """Slope s_h of each head, float64 [heads]: the ALiBi series (Press et al. 2022), equal in every layer.

    A power of two n has 2^(−8(h+1)/n), so 32 heads have 2^(−(h+1)/4). Another count takes the series of the
    largest power of two below it, then every second slope of the series of twice that number.
    """
    below = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    if below < heads:
        series += [2.0 ** (-8.0 * (h + 1) / (2 * below)) for h in range(0, 2 * (heads - below), 2)]
    return torch.tensor(series, dtype=torch.float64)


def decays(heads: int, precision: Precision) -> Tensor:
    """Decay of the state from one token to the next, `exp(−s_h)` [heads]: float32, or float64 for the oracle."""
    return f32(torch.exp(-f32(slopes(heads), precision).double()), precision)


def recurrence(q: Tensor, k: Tensor, v: Tensor, state: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Token recurrence `S ← λ·S + k vᵀ`, then `o = (q/√D)·S`, so a token sees itself undecayed.

    `q`, `k`, `v` are [..., T, H, D] bfloat16 and `state` [..., H, D, D] float32 with the key index first; any
    leading dimensions are independent sequences. Returns `o` [..., T, H, D], rounded to float32 and then to
    bfloat16, and the state after the last token; `state` itself is not written.
    """
    tokens, heads, dim = q.shape[-3:]
    decay = decays(heads, precision).to(q.device).double()[:, None, None]
    scale = f32(torch.tensor(dim, dtype=torch.float64, device=q.device).rsqrt(), precision).double()
    scaled = f32(q.double() * scale, precision).double()
    key, value = k.double(), v.double()
    state = state.to(torch.float64, copy=True)  # worked on in place: 4 MiB a sequence, one step a token
    read = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for t in range(tokens):
        state.mul_(decay).addcmul_(key[..., t, :, :, None], value[..., t, :, None, :])
        state.copy_(f32(state, precision))
        torch.matmul(scaled[..., t, :, None, :], state, out=read[..., t, :, None, :])
    return bf16(f32(read, precision), precision), f32(state, precision)


def lightning_mixer(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    state: Tensor,
    precision: Precision,
    *,
    eps: float = 1e-6,
    theta: float = 10000.0,
) -> tuple[Tensor, Tensor]:
    """Everything between a lightning layer's projections.

    `qkvz` [..., T, 4·H·D] bfloat16 holds q, k, v and the gate's z side by side, `q_norm` and `k_norm` are [D],
    `o_norm` [H·D], `positions` [..., T] integers, `state` [..., H, D, D] float32. q and k are normed a head, then
    rotated; the output is normed over all heads together, then multiplied by sigmoid(z).
    Returns the output [..., T, H·D] bfloat16 and the state after the last token.
    """
    dim, width = q_norm.numel(), o_norm.numel()
    q, k, v, z = qkvz.split(width, dim=-1)
    q, k, v = (part.unflatten(-1, (width // dim, dim)) for part in (q, k, v))
    q = apply_rope(rms_norm(q, q_norm, eps, precision), positions, theta, precision)
    k = apply_rope(rms_norm(k, k_norm, eps, precision), positions, theta, precision)
    out, state = recurrence(q, k, v, state, precision)
    normed = rms_norm(out.flatten(-2), o_norm, eps, precision)
    return mul_bf16(normed, sigmoid_bf16(z, precision), precision), state
