"""The arena: layouts kept, bands, gaps and poison where they belong, nothing of the caller's touched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.contract import Output, Tolerance
from workbench.gate.arena import BAND, Arena, bits, checksum, layout, poison, rebuild, size_in_bytes, walk

OUTPUTS = {"out": Output(Tolerance.ORACLE), "state": Output(Tolerance.ORACLE, inout=True)}


@dataclasses.dataclass(frozen=True)
class Packed:
    """What a weight in a format looks like."""

    shape: tuple[int, int]
    tensors: dict[str, Tensor]


def arguments() -> dict[str, Any]:
    wide = torch.arange(60.0).reshape(4, 15)
    pair = torch.arange(24, dtype=torch.float32).reshape(2, 12)
    return {
        "x": wide[1:, 3:9],
        "q": pair[:, :6],
        "k": pair[:, 6:],
        "w": Packed(
            (2, 3), {"code": torch.tensor([1, 2, 3], dtype=torch.uint8), "scale": torch.ones((), dtype=torch.bfloat16)}
        ),
        "state": torch.ones(3, 5)[:, :4],
        "out": torch.zeros(2, 8, dtype=torch.bfloat16)[:, ::1],
        "count": 3,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_poison_of_a_float_is_nan(dtype: torch.dtype) -> None:
    one = torch.zeros(1, dtype=dtype)
    bits(one).fill_(poison(dtype))
    assert bool(one.float().isnan())
    assert int(bits(one)[0]) == poison(dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_poison_of_an_integer_is_no_index_and_no_padding(dtype: torch.dtype) -> None:
    one = torch.zeros(1, dtype=dtype)
    bits(one).fill_(poison(dtype))
    assert int(one) < -1


def test_contents_and_layout_are_kept_and_the_callers_memory_is_not_used() -> None:
    args = arguments()
    arena = Arena(args, OUTPUTS)
    assert set(arena.args) == set(args)
    assert arena.args["count"] == 3
    assert isinstance(arena.args["w"], Packed)
    for (path, mine), (_, theirs) in zip(walk(args), walk(arena.args)):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype), path
        assert mine.data_ptr() != theirs.data_ptr()
        assert theirs.data_ptr() % mine.element_size() == 0
        if path == "out":
            assert bool((bits(theirs) == poison(theirs.dtype)).all())
        else:
            assert torch.equal(mine, theirs), path
    # views of one memory stay views of one memory
    q, k = arena.args["q"], arena.args["k"]
    assert k.data_ptr() - q.data_ptr() == 6 * 4


def test_what_lies_around_an_argument_is_nan() -> None:
    arena = Arena(arguments(), OUTPUTS)
    x = arena.args["x"]
    around = x.as_strided((3, 15), (15, 1), x.storage_offset())
    assert bool(around[:, :6].isfinite().all())
    assert bool(around[:2, 6:].isnan().all())
    w = arena.args["w"].tensors["code"]
    assert int(w.as_strided((1,), (1,), w.storage_offset() + 3)) == poison(torch.uint8)


def test_an_untouched_arena_is_clean_and_loads_other_contents_at_the_same_addresses() -> None:
    args, other = arguments(), arguments()
    other["x"].mul_(2)
    other["state"].mul_(3)
    arena = Arena(args, OUTPUTS)
    places = [t.data_ptr() for _, t in walk(arena.args)]
    assert arena.inspect(lambda: args) is None
    arena.load(other)
    assert [t.data_ptr() for _, t in walk(arena.args)] == places
    assert torch.equal(arena.args["x"], other["x"])
    assert arena.inspect(lambda: other) is None
    arena.args["out"].zero_()
    arena.args["state"].zero_()
    assert arena.inspect(lambda: other) is None
    snapshot = arena.snapshot()
    assert set(snapshot) == {"out", "state"} and snapshot["state"].is_contiguous()
    arena.bring(args, inputs=False)
    assert bool((arena.args["state"] == 1).all()) and bool(arena.args["out"].isnan().all())
    assert torch.equal(arena.args["x"], other["x"])
    arena.bring(args)
    assert torch.equal(arena.args["x"], args["x"])


@pytest.mark.parametrize(
    ("write", "what", "argument"),
    [
        (lambda a: a["x"][0, 0].add_(1), "input", "x"),
        (lambda a: a["k"][1, 5].add_(1), "input", "k"),
        (lambda a: a["w"].tensors["code"][2].add_(1), "input", "w.tensors.code"),
        (lambda a: a["out"].as_strided((1,), (1,), a["out"].storage_offset() + 16).zero_(), "bounds", "out"),
        (lambda a: a["out"].as_strided((1,), (1,), a["out"].storage_offset() - 1).zero_(), "bounds", "out"),
        (lambda a: a["state"].as_strided((1,), (1,), a["state"].storage_offset() + 4).zero_(), "bounds", "state"),
        (lambda a: a["x"].as_strided((1,), (1,), a["x"].storage_offset() + 7).zero_(), "bounds", "x"),
        (lambda a: a["w"].tensors.update(code=torch.zeros(3)), "rebound", "w.tensors.code"),
        (lambda a: a["out"].t_(), "rebound", "out"),
    ],
)
def test_each_breach_is_named(write: Any, what: str, argument: str) -> None:
    args = arguments()
    arena = Arena(args, OUTPUTS)
    write(arena.args)
    breach = arena.inspect(lambda: args)
    assert breach is not None
    assert (breach.what, breach.argument) == (what, argument)


def test_a_row_of_the_widest_output_past_the_end_still_lies_in_the_band() -> None:
    assert BAND >= 2 * 2 * 4096


def test_checksum_sees_place_and_value() -> None:
    words = torch.arange(64, dtype=torch.int64)
    base = checksum(words.view(torch.uint8))
    assert checksum(words.clone().view(torch.uint8), chunk=5) == base
    assert checksum(words.flip(0).contiguous().view(torch.uint8)) != base
    words[3] += 1
    assert checksum(words.view(torch.uint8)) != base


def test_sizes_and_layouts() -> None:
    args = arguments()
    assert size_in_bytes(args) == 60 * 4 + 24 * 4 + 3 + 2 + 15 * 4 + 32
    other = arguments()
    assert layout(args) == layout(other)
    other["count"] = 4
    assert layout(args) != layout(other)
    doubled = rebuild(args["w"], lambda t: t * 2)
    assert isinstance(doubled, Packed) and doubled.tensors["code"].tolist() == [2, 4, 6]
    assert args["w"].tensors["code"].tolist() == [1, 2, 3]
