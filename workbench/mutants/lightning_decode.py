"""The lightning law with one rule bent at a time; every one of these must fail the gate of `lightning_decode`."""

from __future__ import annotations

from workbench.contract import Mutant

_UPDATE = "state.mul_(decay).addcmul_(key[..., t, :, :, None], value[..., t, :, None, :])"
_READ = "torch.matmul(scaled[..., t, :, None, :], state, out=read[..., t, :, None, :])"
_Q = "q = apply_rope(rms_norm(q, q_norm, eps, precision), positions, theta, precision)"
_K = "k = apply_rope(rms_norm(k, k_norm, eps, precision), positions, theta, precision)"
_NORMED = "normed = rms_norm(out.flatten(-2), o_norm, eps, precision)"
_GATED = "return mul_bf16(normed, sigmoid_bf16(z, precision), precision), state"


def _layer(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary", allowed: bool = False) -> Mutant:
    return Mutant(name, rule, "lightning.py", old, new, caught_by, allowed)


RECURRENCE = (
    _layer(
        "decay_after_update",
        "the decay is applied before the new outer product",
        _UPDATE,
        "state.addcmul_(key[..., t, :, :, None], value[..., t, :, None, :]).mul_(decay)",
    ),
    _layer("no_decay", "the state decays at every token", _UPDATE, _UPDATE.replace(".mul_(decay)", "")),
    _layer("decay_sign", "the decay is exp(−slope), not exp(slope)", "torch.exp(-f32(", "torch.exp(f32("),
    _layer("slopes_from_zero", "head 0 has exponent 1, not 0", "-8.0 * (h + 1) / below", "-8.0 * h / below"),
    _layer(
        "last_slope",
        "the last head has its own slope",
        "-8.0 * (h + 1) / below",
        "-8.0 * min(h + 1, below - 1) / below",
        "still",
    ),
    _layer(
        "slopes_of_other_counts",
        "heads past a power of two take every second slope of twice that number, from its first",
        "range(0, 2 * (heads - below), 2)",
        "range(1, 2 * (heads - below), 2)",
    ),
    _layer(
        "state_bf16",
        "the state is kept in float32",
        "state.copy_(f32(state, precision))",
        "state.copy_(state.bfloat16())",
        "still",
    ),
    _layer(
        "state_transposed",
        "the key index of the state comes first",
        _UPDATE,
        "state.mul_(decay).addcmul_(value[..., t, :, :, None], key[..., t, :, None, :])",
    ),
    _layer(
        "reads_the_old_state",
        "a token sees itself",
        _READ,
        "torch.matmul(scaled[..., t, :, None, :], state - key[..., t, :, :, None] * value[..., t, :, None, :], "
        "out=read[..., t, :, None, :])",
    ),
    _layer(
        "no_scale",
        "the query is divided by √128 (the output norm hides it, but for its eps)",
        "scaled = f32(q.double() * scale, precision).double()",
        "scaled = q.double()",
        "tiny",
    ),
    _layer(
        "initial_state_lost",
        "the state goes on from its slot",
        "state = state.to(torch.float64, copy=True)",
        "state = torch.zeros_like(state, dtype=torch.float64)",
    ),
)
"""Bent rules of the recurrence itself."""

AROUND = (
    _layer(
        "rope_before_norm",
        "a head is normed, then rotated (the norm's weights do not rotate)",
        _Q,
        "q = rms_norm(apply_rope(q, positions, theta, precision), q_norm, eps, precision)",
    ),
    _layer("key_not_rotated", "keys are rotated too", _K, "k = rms_norm(k, k_norm, eps, precision)"),
    _layer("key_not_normed", "keys are normed too", _K, "k = apply_rope(k, positions, theta, precision)", "large"),
    _layer("key_norm_of_query", "keys have their own norm weights", _K, _K.replace("k_norm", "q_norm")),
    _layer("theta", "theta is 10000", "theta: float = 10000.0", "theta: float = 500000.0"),
    _layer("eps_larger", "eps is 1e-6", "eps: float = 1e-6", "eps: float = 1e-5", "tiny"),
    _layer("eps_missing", "eps is not zero", "eps: float = 1e-6", "eps: float = 0.0", "tiny"),
    _layer(
        "output_norm_a_head",
        "the output norm runs over all heads together",
        _NORMED,
        "normed = rms_norm(out, o_norm.unflatten(0, out.shape[-2:]), eps, precision).flatten(-2)",
        "uneven",
    ),
    _layer(
        "gate_before_norm",
        "the output is normed, then gated",
        _NORMED,
        "normed = rms_norm(mul_bf16(out.flatten(-2), sigmoid_bf16(z, precision), precision), o_norm, eps, precision)\n"
        "    z = z * 0 + 64",
    ),
    _layer(
        "silu_gate",
        "the gate is sigmoid(z), not silu(z)",
        _GATED,
        _GATED.replace("sigmoid_bf16(z, precision)", "mul_bf16(z, sigmoid_bf16(z, precision), precision)"),
    ),
    _layer("gate_and_value_swapped", "the projections lie as q, k, v, z", "q, k, v, z = qkvz", "q, k, z, v = qkvz"),
    Mutant(
        "rotation_backwards",
        "the second half turns against the first",
        "rope.py",
        "torch.sin(angle)",
        "torch.sin(-angle)",
    ),
    Mutant(
        "neighbours_paired",
        "channel i is paired with i + 64",
        "rope.py",
        "first, second = x.double().chunk(2, dim=-1)",
        "first, second = x.double()[..., 0::2], x.double()[..., 1::2]",
    ),
    Mutant(
        "position_off_by_one",
        "the first token stands at position 0",
        "rope.py",
        "positions.to(torch.float32).double()",
        "(positions + 1).to(torch.float32).double()",
    ),
    Mutant(
        "positions_bf16",
        "angles are float32",
        "rope.py",
        "positions.to(torch.float32).double()",
        "positions.to(torch.bfloat16).double()",
    ),
    Mutant(
        "angle_float64",
        "the product of position and frequency is rounded to float32",
        "rope.py",
        "(positions.to(torch.float32).double()[..., None] * inverse.double()).to(torch.float32)",
        "positions.double()[..., None] * inverse.double()",
    ),
    Mutant(
        "eps_outside_root",
        "eps is added to the mean square, under the root",
        "norms.py",
        "torch.rsqrt(mean_square.double() + eps)",
        "1 / (mean_square.double().sqrt() + eps)",
        "tiny",
    ),
    Mutant(
        "mean_subtracted",
        "the norm does not subtract the mean",
        "norms.py",
        "mean_square = f32(x.double().square().mean(-1, keepdim=True), precision)",
        "mean_square = f32(x.double().var(-1, keepdim=True, correction=0), precision)",
        "correlated",
    ),
)
"""Bent rules of norms, rotation and gate."""

ALLOWED = (
    _layer(
        "scale_after_read_out",
        "dividing the result by √128 instead of the query rounds elsewhere, no worse",
        _READ,
        "torch.matmul(q[..., t, :, None, :].double(), state, out=read[..., t, :, None, :]).mul_(scale)",
        allowed=True,
    ),
    Mutant(
        "rotation_rounded_once",
        "a fused multiply-add rotates with one rounding instead of three",
        "rope.py",
        "f32(first * cos, precision).double() - f32(second * sin, precision).double()",
        "first * cos - second * sin",
        allowed=True,
    ),
)
"""Other roundings that the law permits: the gate must let them pass."""

MUTANTS = RECURRENCE + AROUND + ALLOWED
