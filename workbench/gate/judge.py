"""Whether an output is right: one pure function per tolerance class, from tensors and a rule to a verdict.

`judge(rule, actual, before, model, oracle)` holds the output `actual` against the law evaluated in the model's
roundings (`model`) and in float64 (`oracle`). It keeps no state, so it can be tried in a shell.

BITWISE   every touched element has the model's bits.
ORACLE    with e = actual − oracle, m = model − oracle, and s the scale of a row: the root mean square of its m, at
          least that of its oracle times the usual ratio of the two (the median over rows, at least `floor`);
          whole tensor: rms(e) ≤ multiple · max(rms(m), floor · rms(oracle));
          each row:     rms(e) ≤ 2 · multiple · s;
          each element: |e| ≤ multiple · (6.5 · s + 2 · floor · |oracle|).
          6.5 standard deviations are passed by one of 1e10 Gaussian errors, and the second term is the widest
          rounding of an element that is far larger than its row. With a multiple of 2 and the floor of bfloat16
          a single element off by 2.6 % of its row's scale fails. Where the model's own errors have longer tails
          (products of two roundings) the cap grows by as much as its worst element exceeds it, at most fourfold.
SELECTION blocks ascending, exactly `count`, −1 only in the tail, none twice, none that may not be chosen, all that
          are forced; a free block may be chosen if its score is within one step of bfloat16 of the k-th best,
          and must be if it lies more than a step above.
TOKENS    the model's token, or one whose perturbed logit lies within `slack` of the best.

What the law does not touch keeps its bits, and poison left in what it touches fails as not written. NaN and
infinity pass only where the law itself has them.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from workbench.contract import Expected, Output, Tolerance
from workbench.gate.arena import bits, poison
from workbench.gate.result import Kind, Number

DEVIATIONS = 6.5
"""Row scales an element's error may reach: 1e8 Gaussian errors stay below 5.8, 1e10 below 6.5."""
TAIL = 4.0
"""The most by which the law's own long tails may widen the element's cap."""
BAND = 2.0**-7 + 2.0**-12
"""Relative width of one step of bfloat16 at its widest, and what float32 may add to an exponential."""
TINY = 2.0**-120
"""Errors below the normal range of bfloat16 and float32, where devices may flush to zero."""
_CHUNK = 1 << 23


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one output fared: `kind` None is a pass. `margin` is the worst error over the allowed one."""

    kind: Kind | None = None
    margin: float = 0.0
    detail: str = ""
    index: tuple[int, ...] = ()
    got: Number | None = None
    expected: Number | None = None
    error: float | None = None
    allowed: float | None = None
    share: float | None = None


def judge(rule: Output, actual: Tensor, before: Tensor, model: Expected, oracle: Expected | None = None) -> Verdict:
    """Judge one output by its rule.

    `actual` and `before` have the output's shape and dtype; `before` is what the memory held when the call began
    (poison, or the contents of an `inout`). ORACLE needs `oracle`; SELECTION uses its scores too if given.
    Raises ValueError where the contract and the law disagree (shapes, a missing oracle or fact).
    """
    if model.value.shape != actual.shape:
        raise ValueError(f"the law gives shape {tuple(model.value.shape)} for an output of {tuple(actual.shape)}")
    actual, before = actual.contiguous(), before.expand(actual.shape)
    touched = model.touched
    if touched is not None:
        verdict = _untouched(actual, before, touched)
        if verdict is not None:
            return verdict
    if not rule.inout:
        verdict = _unwritten(actual, touched)
        if verdict is not None:
            return verdict
    if rule.tolerance is Tolerance.BITWISE:
        return _bitwise(actual, model)
    if rule.tolerance is Tolerance.ORACLE:
        if oracle is None:
            raise ValueError("ORACLE needs the float64 evaluation")
        return _oracle(rule, actual, model, oracle)
    if rule.tolerance is Tolerance.SELECTION:
        return _selection(actual, model, oracle)
    return _tokens(actual, model)


def shown(value: Tensor | float | int) -> Number:
    """A value as the record holds it; NaN and infinities as words."""
    number = value.item() if isinstance(value, Tensor) else value
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def place(flat: int, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Index of element number `flat` of a tensor of `shape`."""
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return tuple(reversed(index))


def _mask(touched: Tensor, like: Tensor) -> Tensor:
    return touched.to(like.device).reshape(*touched.shape, *[1] * (like.ndim - touched.ndim))


def _untouched(actual: Tensor, before: Tensor, touched: Tensor) -> Verdict | None:
    rows = (~touched.to(actual.device)).nonzero(as_tuple=True)
    if not len(rows[0]):
        return None
    changed = bits(actual[rows]) != bits(before[rows])
    wrong = changed.reshape(-1).nonzero()
    if not len(wrong):
        return None
    where = place(int(wrong[0]), changed.shape)
    index = (*(int(axis[where[0]]) for axis in rows), *where[1:])
    return Verdict(
        Kind.PADDING_TOUCHED, math.inf, "the law does not touch this place (padding, or another sequence's)", index,
        shown(actual[index]), shown(before[index]), share=len(wrong) / changed.numel(),
    )  # fmt: skip


def _unwritten(actual: Tensor, touched: Tensor | None) -> Verdict | None:
    left = bits(actual) == poison(actual.dtype)
    if touched is not None:
        left &= _mask(touched, actual)
    count = int(left.sum())
    if not count:
        return None
    index = place(int(left.reshape(-1).to(torch.uint8).argmax()), actual.shape)
    return Verdict(
        Kind.UNWRITTEN, math.inf, "still holds the poison it had before the call", index, share=count / left.numel()
    )


def _bitwise(actual: Tensor, model: Expected) -> Verdict:
    value = model.value.to(actual.device)
    if value.dtype != actual.dtype:
        raise ValueError(f"the law gives {value.dtype} for a bitwise output of {actual.dtype}")
    wrong = bits(actual) != bits(value.contiguous())
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & value.isnan())
    if model.touched is not None:
        wrong &= _mask(model.touched, actual)
    count = int(wrong.sum())
    if not count:
        return Verdict()
    index = place(int(wrong.reshape(-1).to(torch.uint8).argmax()), actual.shape)
    got, expected = actual[index], value[index]
    finite = not actual.is_floating_point() or bool(got.isfinite()) or not bool(expected.isfinite())
    return Verdict(
        Kind.WRONG_VALUES if finite else Kind.NOT_FINITE, math.inf, "every bit must be the law's", index,
        shown(got), shown(expected), abs(float(got) - float(expected)) if finite else None, 0.0, count / wrong.numel(),
    )  # fmt: skip


def _rows(touched: Tensor | None, lead: torch.Size, device: torch.device) -> Tensor:
    """Numbers of the rows that the law touches, among the rows over the leading dimensions `lead`."""
    rows = torch.arange(math.prod(lead), device=device)
    if touched is None:
        return rows
    if touched.ndim > len(lead):
        raise ValueError("`touched` is finer than the output's rows")
    mask = touched.to(device).reshape(*touched.shape, *[1] * (len(lead) - touched.ndim))
    return rows[mask.expand(lead).reshape(-1)]


def _take(tensor: Tensor, width: int, part: Tensor) -> Tensor:
    """The rows `part` of a tensor seen as rows of `width`, on the device of `part`."""
    return tensor.reshape(-1, width)[part.to(tensor.device)].to(part.device)


def _errors(actual: Tensor, model: Tensor, oracle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of the output and of the model against the oracle, and the oracle, in float64; zero where not finite."""
    sound = model.isfinite() & oracle.isfinite()
    zero = torch.zeros((), dtype=torch.float64, device=actual.device)
    a, m, o = actual.double(), model.double(), oracle.double()
    return torch.where(sound, a - o, zero), torch.where(sound, m - o, zero), torch.where(sound, o, zero)


def _not_finite(actual: Tensor, model: Tensor, oracle: Tensor) -> Tensor:
    """Where the output is not finite though the law is, or finite though the law is not."""
    same = torch.where(model.isnan(), actual.isnan(), actual.double() == model.double())
    same |= actual.isfinite() & oracle.isfinite()  # the law overflowed where better arithmetic need not
    return torch.where(model.isfinite() & oracle.isfinite(), ~actual.isfinite(), ~same)


def _oracle(rule: Output, actual: Tensor, model: Expected, oracle: Expected) -> Verdict:
    lead = actual.shape[: actual.ndim - rule.row_dims]
    width = math.prod(actual.shape[len(lead) :])
    rows = _rows(model.touched, lead, actual.device)
    if not len(rows) or not width:
        return Verdict()
    parts = rows.split(max(1, _CHUNK // width))

    law_errors, law_sizes = [], []
    for part in parts:
        a, m, o = (_take(tensor, width, part) for tensor in (actual, model.value, oracle.value))
        bad = _not_finite(a, m, o)
        if bool(bad.any()):
            at = int(bad.reshape(-1).to(torch.uint8).argmax())
            index = place(int(part[at // width]) * width + at % width, actual.shape)
            got, expected = a.reshape(-1)[at], m.reshape(-1)[at]
            kind = Kind.WRONG_VALUES if bool(got.isfinite()) else Kind.NOT_FINITE
            detail = f"the law is {'' if bool(expected.isfinite()) else 'not '}finite here"
            share = int(bad.sum()) / bad.numel()
            return Verdict(kind, math.inf, detail, index, shown(got), shown(expected), share=share)
        _, m, o = _errors(a, m, o)
        law_errors.append(_rms(m))
        law_sizes.append(_rms(o))
    law_error, law_size = torch.cat(law_errors), torch.cat(law_sizes)
    alive = law_size > 0
    usual = float((law_error[alive] / law_size[alive]).median()) if bool(alive.any()) else 0.0
    scale = torch.maximum(law_error, law_size * max(rule.floor, usual)) + TINY
    whole_allowed = rule.multiple * max(float(_rms(law_error)), rule.floor * float(_rms(law_size)), TINY)

    row_errors, worst, worst_at, tail, beyond = [], -1.0, 0, 1.0, 0
    for part, s in zip(parts, scale.split(len(parts[0]))):
        e, m, o = _errors(*(_take(tensor, width, part) for tensor in (actual, model.value, oracle.value)))
        unit = DEVIATIONS * s[:, None] + 2 * rule.floor * o.abs()
        tail = max(tail, float((m.abs() / unit).max()))
        ratio = (e.abs() / (rule.multiple * unit)).reshape(-1)
        beyond += int((e.abs() > 3 * rule.multiple * s[:, None]).sum())
        top = int(ratio.argmax())
        if float(ratio[top]) > worst:
            worst, worst_at = float(ratio[top]), int(part[top // width]) * width + top % width
        row_errors.append(_rms(e))
    row_error = torch.cat(row_errors)
    row_ratio = row_error / (2 * rule.multiple * scale)
    whole = float(_rms(row_error))
    ratios = {"tensor": whole / whole_allowed, "row": float(row_ratio.max()), "element": worst / min(tail, TAIL)}
    measure = max(ratios, key=lambda name: ratios[name])
    margin = ratios[measure]
    if margin <= 1.0:
        return Verdict(margin=margin)
    words = {"tensor": "root mean square error of the whole tensor", "row": "root mean square error of the row"}
    text = f"{words.get(measure, 'error of the element')} is {margin:.3g} times what is allowed"
    index, share = place(worst_at, actual.shape), beyond / (len(rows) * width)
    if measure == "row":
        row = int(row_ratio.argmax())
        index, error, allowed = (
            place(int(rows[row]), lead),
            float(row_error[row]),
            float(2 * rule.multiple * scale[row]),
        )
        return Verdict(Kind.WRONG_VALUES, margin, text, index, error=error, allowed=allowed, share=share)
    got, expected = actual[index], oracle.value[index]
    error = whole if measure == "tensor" else abs(float(got) - float(expected))
    return Verdict(
        Kind.WRONG_VALUES, margin, text, index, shown(got), shown(expected), error, error / margin, share
    )  # fmt: skip


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _order(score: Tensor) -> Tensor:
    """Integers in the order of the scores, one apart for neighbours in bfloat16; int32."""
    word = score.to(torch.bfloat16).view(torch.int16).int()
    return torch.where(word >= 0, word, -(word & 0x7FFF))


def _selection(actual: Tensor, model: Expected, oracle: Expected | None) -> Verdict:
    try:
        scores, count = model.facts["scores"], model.facts["count"]
    except KeyError as missing:
        raise ValueError(f"SELECTION needs the fact {missing}") from None
    lead, slots, blocks = actual.shape[:-1], actual.shape[-1], scores.shape[-1]
    exact = oracle.facts.get("scores") if oracle is not None else None
    rows = _rows(model.touched, lead, actual.device)
    margin, wrong, first = 0.0, 0, None
    for part in rows.split(max(1, _CHUNK // max(blocks, 1))):
        chosen, score = _take(actual, slots, part), _take(scores, blocks, part)
        number = _take(count, 1, part)[:, 0]
        true = _take(exact, blocks, part).double() if exact is not None else None
        faults, used = _choices(chosen.long(), score, number.long(), true)
        margin = max(margin, used)
        for text, bad in faults:
            if bool(bad.any()):
                wrong = max(wrong, int(bad.sum()))
                row = int(bad.to(torch.uint8).argmax())
                if first is None:
                    first = (text, int(part[row]), chosen[row].tolist())
    if first is None:
        return Verdict(margin=margin)
    text, row, got = first
    want = model.value.reshape(-1, slots)[row].tolist()
    differ = sorted(set(got) - set(want)), sorted(set(want) - set(got))
    text += f" (chosen here and not by the law: {_few(differ[0])}; by the law and not here: {_few(differ[1])})"
    return Verdict(Kind.WRONG_SELECTION, math.inf, text, place(row, lead), share=wrong / max(1, len(rows)))


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "") or "none"


def _choices(
    chosen: Tensor, score: Tensor, count: Tensor, true: Tensor | None
) -> tuple[list[tuple[str, Tensor]], float]:
    """Faults of rows of choices [rows, slots], worst first, each with the rows that have it; and the margin used."""
    rows, slots = chosen.shape
    blocks = score.shape[-1]
    head = torch.arange(slots, device=chosen.device) < count[:, None]
    valid = (chosen >= 0) & (chosen < blocks)
    mask = torch.zeros(rows, blocks + 1, dtype=torch.bool, device=chosen.device)
    mask.scatter_(1, torch.where(valid & head, chosen, blocks), True)
    mask = mask[:, :blocks]
    forced, barred = score == math.inf, score == -math.inf
    needed = torch.minimum(forced.sum(-1), count)
    free = ~forced & ~barred
    rest = (count - needed).clamp(max=free.sum(-1))
    order = _order(score)
    lowest = torch.iinfo(order.dtype).min // 2
    ranked = torch.where(free, order, lowest).sort(-1, descending=True).values
    last = (rest - 1).clamp(min=0)[:, None]
    bar = ranked.gather(1, last) if blocks else last
    low, high = order < bar - 1, order > bar + 1
    used = torch.where(mask & free & (rest > 0)[:, None], bar - order, 0).amax(-1) if blocks else rest * 0
    margin = float(used.clamp(0, 1).max()) if rows else 0.0
    if true is not None:
        true_bar = torch.where(free, true, -math.inf).sort(-1, descending=True).values.gather(1, last)
        low &= true < true_bar * (1 - BAND)
        high &= true > true_bar * (1 + BAND)
    free &= (rest > 0)[:, None]
    pairs = (chosen[:, 1:] <= chosen[:, :-1]) & head[:, 1:]
    return [
        ("a slot past the last chosen block is not −1", ((chosen != -1) & ~head).any(-1)),
        ("fewer blocks are chosen than must be", ((chosen == -1) & head).any(-1)),
        ("a chosen block does not exist", (~valid & head).any(-1)),
        ("a block is chosen twice", head.sum(-1) > torch.where(valid & head, 1, 0).sum(-1).minimum(mask.sum(-1))),
        ("blocks do not ascend", pairs.any(-1)),
        ("a block is chosen that no key of which may be seen", (mask & barred).any(-1)),
        ("a forced block is missing", (mask & forced).sum(-1) < needed),
        ("a chosen block scores more than one step below the last that may be chosen", (mask & free & low).any(-1)),
        ("a block that scores more than one step above the last is not chosen", (~mask & free & high).any(-1)),
    ], margin


def _tokens(actual: Tensor, model: Expected) -> Verdict:
    value = model.value.to(actual.device).reshape(-1).long()
    token = actual.reshape(-1).long()
    wrong = token != value
    if model.touched is not None:
        wrong &= model.touched.reshape(-1).to(actual.device)
    margin, rows = 0.0, wrong.nonzero().reshape(-1)
    if not len(rows):
        return Verdict()
    try:
        perturbed, slack = model.facts["perturbed"], model.facts["slack"]
    except KeyError as missing:
        raise ValueError(f"TOKENS needs the fact {missing}") from None
    perturbed = perturbed.to(actual.device).reshape(len(token), -1)[rows].double()
    slack, picked = slack.to(actual.device).reshape(-1)[rows].double(), token[rows]
    inside = (picked >= 0) & (picked < perturbed.shape[-1])
    score = perturbed.gather(1, picked.clamp(0, perturbed.shape[-1] - 1)[:, None])[:, 0]
    below = torch.where(inside, perturbed.amax(-1) - score, math.inf)
    # without slack (greedy) the law breaks ties by the lowest id, so no other token is right
    bad = ~((below <= slack) & (slack > 0))
    if not bool(bad.any()):
        return Verdict(margin=float((below / slack).max()))
    at = int(bad.to(torch.uint8).argmax())
    row = int(rows[at])
    return Verdict(
        Kind.WRONG_TOKEN, max(margin, math.inf), "the token's perturbed logit lies this far below the best",
        place(row, actual.shape), int(token[row]), int(value[row]),
        float(below[at]) if bool(below[at].isfinite()) else None, float(slack[at]), int(bad.sum()) / len(token),
    )  # fmt: skip
