"""The law of the MLP with one rule bent at a time; every one of these must fail the gate of `fused_mlp`."""

from __future__ import annotations

from workbench.contract import Mutant
from workbench.mutants.linear import FORMATS, PRODUCT

_SPLIT = "gate, up = linear(x, gate_up, precision).chunk(2, -1)"
_SILU = "return mul_bf16(bf16(g * torch.sigmoid(g), precision), up, precision)"
_DOWN = "return linear(silu_times(gate, up, precision), down, precision)"


def _mlp(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary") -> Mutant:
    return Mutant(name, rule, "mlp.py", old, new, caught_by)


def _activation(expression: str) -> str:
    return _SILU.replace("g * torch.sigmoid(g)", expression)


MLP = (
    _mlp("gate_and_up_swapped", "the gate's rows come first", _SPLIT, _SPLIT.replace("gate, up =", "up, gate =")),
    _mlp(
        "gate_and_up_interleaved",
        "gate and up are halves, not alternate rows",
        _SPLIT,
        _SPLIT.replace(".chunk(2, -1)", ".unflatten(-1, (-1, 2)).unbind(-1)"),
    ),
    _mlp("silu_on_up", "SiLU is the gate's", "g = gate.double()", "g, up = up.double(), gate"),
    _mlp("gelu", "the activation is SiLU, not GELU", _SILU, _activation("torch.nn.functional.gelu(g)")),
    _mlp("quick_gelu", "SiLU's sigmoid has no factor", _SILU, _activation("g * torch.sigmoid(1.702 * g)")),
    _mlp("relu", "the activation is SiLU, not ReLU", _SILU, _activation("g.clamp(min=0)"), "tiny"),
    _mlp("sigmoid_alone", "SiLU multiplies the sigmoid by the gate", _SILU, _activation("torch.sigmoid(g)")),
    _mlp("gate_negated", "SiLU takes the gate with its sign", _SILU, _activation("g * torch.sigmoid(-g)")),
    _mlp(
        "gate_clamped", "the gate has no upper limit", _SILU, _activation("g.clamp(max=7) * torch.sigmoid(g)"), "large"
    ),
    _mlp("up_clamped", "the up projection has no limit", _SILU, _SILU.replace("up,", "up.clamp(-7, 7),"), "large"),
    _mlp("up_plus_one", "the up projection has no offset", _SILU, _SILU.replace("up,", "up + 1,")),
    _mlp(
        "sum_for_product",
        "gate and up are multiplied",
        _SILU,
        _SILU.replace("mul_bf16(", "bf16(up + ").replace(", up, ", ", "),
    ),
    _mlp(
        "last_channel_dropped",
        "every channel between the projections counts",
        _DOWN,
        "inner = silu_times(gate, up, precision)\n    inner[..., -1] = 0\n    return linear(inner, down, precision)",
    ),
    _mlp(
        "product_in_fp8",
        "the product is not quantised unless the workload says so",
        _SILU,
        _SILU + ".to(torch.float8_e5m2).to(torch.bfloat16)",
    ),
)

MUTANTS = (*MLP, *PRODUCT, *FORMATS)
