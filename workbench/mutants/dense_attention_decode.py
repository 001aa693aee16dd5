"""The law of attention with one rule bent at a time: scale, softmax, heads, and the output gate.

`SHARED` bends what all four attention ops rest on, `DENSE` the dense path.
"""

from __future__ import annotations

from workbench.contract import Mutant

_SCALE = "* q.shape[-1] ** -0.5"
_WEIGHTS = "weights = torch.exp(logits - shift)"
_TOTAL = "self.total = self.total * fade + weights.sum(-1, keepdim=True)"
_RESULT = "return self.mean / self.total.masked_fill(self.total == 0, 1.0)"
_HEADS = "return slice(kv_head * group, (kv_head + 1) * group)"
_GATED = "return mul_bf16(attended, sigmoid_bf16(gate, precision), precision)"
_SEEN = "seen = index[None, :] <= positions[rows, None]"
_TAKE = "softmax.add(_logits(q[rows, mine], keys[None, piece, kv_head], seen), values[None, piece, kv_head])"


def _bent(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary", allowed: bool = False) -> Mutant:
    return Mutant(name, rule, "attention.py", old, new, caught_by, allowed)


SHARED = (
    _bent("scale_missing", "q·k is scaled by 1/√128", _SCALE, ""),
    _bent("scale_by_dim", "the scale is 1/√128, not 1/128", _SCALE, "* q.shape[-1] ** -1.0"),
    _bent("softmax_base_two", "weights are exp, not 2 to the power", _WEIGHTS, "weights = torch.exp2(logits - shift)"),
    _bent(
        "logits_in_bf16",
        "logits are not rounded to bfloat16 before the softmax",
        "    return logits.masked_fill(~allowed",
        "    logits = logits.to(torch.bfloat16).double()\n    return logits.masked_fill(~allowed",
        caught_by="large",
    ),
    _bent(
        "no_running_maximum",
        "the largest logit is taken off before exp, in float32",
        _WEIGHTS,
        "shift = torch.zeros_like(shift)\n        fade = torch.ones_like(shift)\n"
        "        weights = torch.exp(logits.float()).double()",
        caught_by="large",
    ),
    _bent("sink", "no constant is added to the sum of weights", _TOTAL, _TOTAL + " + 1.0"),
    _bent(
        "heads_interleaved",
        "query head h reads key-value head h // 16, not h % 2",
        _HEADS,
        "return slice(kv_head, heads, kv_heads)",
    ),
    _bent(
        "heads_reversed",
        "the first 16 query heads read key-value head 0",
        _HEADS,
        "return slice((kv_heads - 1 - kv_head) * group, (kv_heads - kv_head) * group)",
    ),
    _bent("gate_missing", "the output is gated", _GATED, "return bf16(attended, precision)"),
    _bent("gate_without_sigmoid", "the gate is a sigmoid", _GATED, "return mul_bf16(attended, gate, precision)"),
    _bent(
        "sigmoid_of_output",
        "the sigmoid is of the gate, not of attention's output",
        _GATED,
        "return mul_bf16(gate, sigmoid_bf16(attended, precision), precision)",
    ),
    _bent(
        "gate_is_silu",
        "the gate is sigmoid, not SiLU",
        _GATED,
        "return mul_bf16(attended, mul_bf16(gate, sigmoid_bf16(gate, precision), precision), precision)",
    ),
    _bent(
        "gate_of_the_next_head",
        "each head has its own 128 gates",
        _GATED,
        "return mul_bf16(attended, sigmoid_bf16(gate.roll(128, -1), precision), precision)",
    ),
    _bent(
        "gate_clamped",
        "the sigmoid is exact far from 0",
        _GATED,
        "return mul_bf16(attended, sigmoid_bf16(gate.clamp(-4.0, 4.0), precision), precision)",
        caught_by="saturated",
    ),
    _bent(
        "epsilon_added",
        "nothing is added to small values",
        _RESULT,
        "return self.mean / self.total.masked_fill(self.total == 0, 1.0) + 1e-6",
        caught_by="tiny",
    ),
    _bent(
        "half_precision",
        "values have bfloat16's range, not half precision's",
        "self.mean = self.mean * fade + weights @ values.double()",
        "self.mean = self.mean * fade + weights @ values.half().double()",
        caught_by="tiny",
    ),
    _bent(
        "product_not_rounded_first",
        "(allowed) sigmoid and product rounded once together: more exact than the release",
        _GATED,
        "return bf16(attended.double() * torch.sigmoid(gate.double()), precision)",
        allowed=True,
    ),
    _bent(
        "weights_in_bf16",
        "(allowed) weights rounded to bfloat16 before they meet the values, as the released kernel does",
        "weights @ values.double()",
        "weights.to(torch.bfloat16).double() @ values.double()",
        allowed=True,
    ),
)

DENSE = (
    _bent("newest_key_missing", "a query sees its own key", _SEEN, _SEEN.replace("<=", "<"), caught_by="needle"),
    _bent(
        "first_key_missing",
        "key 0 is seen",
        _SEEN,
        "seen = (index[None, :] <= positions[rows, None]) & (index[None, :] > 0)",
        caught_by="needle",
    ),
    _bent(
        "last_page_missing",
        "the last page counts, full or not",
        _SEEN,
        "seen = index[None, :] < (positions[rows, None] + 1) // BLOCK * BLOCK",
    ),
    _bent(
        "first_page_missing",
        "the first page counts",
        _SEEN,
        "seen = (index[None, :] <= positions[rows, None]) & (index[None, :] >= BLOCK)",
    ),
    _bent(
        "window_of_2048",
        "all keys are seen, not a sliding window",
        _SEEN,
        "seen = (index[None, :] <= positions[rows, None]) & (index[None, :] > positions[rows, None] - 2048)",
        caught_by="needle",
    ),
    _bent(
        "values_of_the_other_head",
        "values come from the key's own head",
        _TAKE,
        _TAKE.replace("values[None, piece, kv_head]", "values[None, piece, kv_head - 1]"),
    ),
    _bent(
        "keys_of_the_other_head",
        "keys come from the value's own head",
        _TAKE,
        _TAKE.replace("keys[None, piece, kv_head]", "keys[None, piece, kv_head - 1]"),
    ),
    _bent(
        "values_one_row_late",
        "value and key are of the same row",
        _TAKE,
        _TAKE.replace("values[None, piece, kv_head])", "values[None, piece, kv_head].roll(1, -2))"),
    ),
)

MUTANTS = (*SHARED, *DENSE)
