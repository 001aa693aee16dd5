"""The law of residual_rmsnorm with one rule bent at a time."""

from __future__ import annotations

from workbench.contract import Mutant

_ADD = "return add_bf16(x, mul_bf16(branch, scale, precision), precision)"
_MEAN = "mean_square = f32(x.double().square().mean(-1, keepdim=True), precision)"
_INVERSE = "inverse = f32(torch.rsqrt(mean_square.double() + eps), precision)"
_NORMED = "normed = bf16(f32(x.double() * inverse.double(), precision), precision)"
_WEIGHTED = "return mul_bf16(normed, weight, precision)"
_ROUND = "return x.to(torch.bfloat16) if precision is MODEL else x.double()"
_TRUNCATED = "(x.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)"


def _norms(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary", allowed: bool = False) -> Mutant:
    return Mutant(name, rule, "norms.py", old, new, caught_by, allowed)


MUTANTS = (
    _norms("branch_unscaled", "the branch is scaled", _ADD, "return add_bf16(x, branch, precision)"),
    _norms(
        "branch_not_rounded",
        "the scaled branch is rounded before the sum",
        _ADD,
        "return bf16(f32(x.double() + branch.double() * scale, precision), precision)",
    ),
    _norms(
        "scale_in_bfloat16",
        "the factor is float32",
        _ADD,
        "return add_bf16(x, mul_bf16(branch, torch.tensor(scale).bfloat16(), precision), precision)",
    ),
    _norms(
        "residual_scaled",
        "only the branch is scaled",
        _ADD,
        "return mul_bf16(add_bf16(x, branch, precision), scale, precision)",
    ),
    _norms(
        "branch_subtracted",
        "the branch is added",
        _ADD,
        "return add_bf16(x, mul_bf16(branch, -scale, precision), precision)",
    ),
    _norms("residual_stale", "the residual takes the sum", _ADD, "return bf16(x, precision)"),
    _norms(
        "scale_of_fewer_layers",
        "32 layers, not 31",
        _ADD,
        "return add_bf16(x, mul_bf16(branch, scale * (32 / 31) ** 0.5, precision), precision)",
    ),
    Mutant(
        "rounded_toward_zero",
        "rounding to the nearest, ties to even",
        "numerics.py",
        _ROUND,
        f"return {_TRUNCATED} if precision is MODEL else x.double()",
    ),
    _norms("eps_tenfold", "eps is 1e-6", _INVERSE, _INVERSE.replace("+ eps", "+ 10 * eps"), "tiny"),
    _norms("eps_missing", "eps is added", _INVERSE, _INVERSE.replace(" + eps", ""), "tiny"),
    _norms(
        "eps_outside_the_root",
        "eps is added to the mean square, not to its root",
        _INVERSE,
        "inverse = f32(1 / (mean_square.double().sqrt() + eps), precision)",
        "tiny",
    ),
    _norms(
        "eps_as_a_floor",
        "eps is added, not a least value",
        _INVERSE,
        "inverse = f32(torch.rsqrt(mean_square.double().clamp_min(eps)), precision)",
        "tiny",
    ),
    _norms("sum_of_squares", "the mean of the squares", _MEAN, _MEAN.replace(".mean(", ".sum(")),
    _norms("mean_magnitude", "squares, not magnitudes", _MEAN, _MEAN.replace(".square()", ".abs()")),
    _norms(
        "mean_removed",
        "no mean is subtracted",
        _NORMED,
        "normed = bf16((x.double() - x.double().mean(-1, keepdim=True)) * inverse.double(), precision)",
        "outliers",
    ),
    _norms(
        "last_channel_dropped",
        "every channel counts",
        _MEAN,
        _MEAN.replace("x.double()", "x[..., :-1].double()"),
        "outliers",
    ),
    _norms(
        "norm_of_each_head",
        "one norm over the whole row",
        _MEAN,
        "mean_square = x.double().square().unflatten(-1, (2, -1)).mean(-1).repeat_interleave(x.shape[-1] // 2, -1)",
        "outliers",
    ),
    _norms("weight_missing", "the weight multiplies", _WEIGHTED, "return normed"),
    _norms(
        "weight_plus_one", "the weight is stored whole", _WEIGHTED, "return mul_bf16(normed, weight + 1, precision)"
    ),
    _norms(
        "one_rounding",
        "rounded before the weight too; a kernel that rounds once is nearer the truth",
        _NORMED,
        "normed = f32(x.double() * inverse.double(), precision)",
        allowed=True,
    ),
)
