"""The gate on a small contract: honest variants pass, every planted fault is named."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench import gate_example as example
from workbench import gate
from workbench.contract import Expected
from workbench.errors import UsageError
from workbench.gate import GateResult, Kind
from workbench.gate import judge as judge_module
from workbench.gate.faults import Planted, faults
from workbench.gate.mutation import copied, law
from workbench.variant import Variant

CONTRACT = example.contract()
SIZE = CONTRACT.presets["smoke"][0]
Function = Callable[..., Any]


def check(function: Function, **options: Any) -> GateResult:
    return gate.check(CONTRACT, example.variant(function), options.pop("workload", SIZE), **{"seeds": (0,), **options})


def kind(function: Function, **options: Any) -> Kind | None:
    found = check(function, **options).failure
    return found.kind if found else None


def test_an_honest_variant_passes_everything() -> None:
    result = check(example.right, seeds=(0, 1))
    assert result.passed and result.failure is None
    assert result.cases == 2 * 5 + 2 * 5  # seeds × regimes of the size, regimes of two edges
    assert result.margin is not None
    assert result.margin <= 1
    assert result.graph == "not tried: no GPU" or torch.cuda.is_available()
    assert result.to_json()["passed"] is True


def test_edges_are_checked_once_for_a_variant() -> None:
    calls = 0

    def counted(**args: Any) -> None:
        nonlocal calls
        calls += 1
        example.right(**args)

    subject = example.variant(counted)
    first = gate.check(CONTRACT, subject, SIZE, seeds=(0,))
    before = calls
    second = gate.check(CONTRACT, subject, SIZE, seeds=(0,))
    alone = gate.check(CONTRACT, subject, SIZE, seeds=(0,), edges=False)
    assert first.cases == second.cases == alone.cases + 10
    assert calls - before == 2 * (before - 10)


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_planted_faults_are_named(fault: Any) -> None:
    if fault.cuda and not torch.cuda.is_available():
        pytest.skip("needs a GPU: work on another stream")
    planted = Planted(CONTRACT, fault, copied())

    def function(**args: Any) -> None:
        if fault.at is None or (len(args["x"]) == 3 if "batch" in fault.at[0] else True):
            planted.variant.function(**args)
        else:
            example.right(**args)

    found = check(function, device="cuda" if fault.cuda else "cpu").failure
    assert found is not None
    assert found.kind in fault.kinds
    assert found.workload and found.regime and found.seed == 0
    assert found.command("example", "mine").startswith("workbench check op=example variant=mine batch=")


def test_a_failure_says_where_by_how_much_and_how_to_repeat_it() -> None:
    def function(out: Tensor, **args: Any) -> None:
        example.right(out=out, **args)
        out[2, 5] += 1

    found = check(function, seeds=(7,)).failure
    assert found is not None
    assert (found.kind, found.output, found.index, found.seed) == (Kind.WRONG_VALUES, "out", (2, 5), 7)
    assert found.error == pytest.approx(1, rel=0.05)
    assert found.allowed is not None
    assert found.allowed < 0.1
    assert found.share == pytest.approx(1 / 256)
    assert found.sentence.startswith("wrong values in out[2, 5]: error of the element is ")
    assert (
        found.command("example", "mine", "plugin=a.py")
        == "workbench check op=example variant=mine batch=4 context=64 regime=ordinary seed=7 plugin=a.py"
    )


def test_right_for_small_inputs_zeros_for_large_ones() -> None:
    def function(x: Tensor, out: Tensor, **args: Any) -> None:
        example.right(x=x, out=out, **args)
        if float(x.abs().max()) > 1000:
            out.zero_()

    found = check(function).failure
    assert found is not None and (found.kind, found.regime) == (Kind.WRONG_VALUES, "large")


def test_the_last_calls_output_is_stale() -> None:
    kept: list[dict[str, Tensor]] = []

    def function(total: Tensor, out: Tensor, **args: Any) -> None:
        example.right(total=total, out=out, **args)
        kept.append({"out": out.clone()})
        if len(kept) > 1 and kept[-2]["out"].shape == out.shape:
            out.copy_(kept[-2]["out"])

    assert kind(function) is Kind.STALE


def test_kept_under_the_address_of_the_input() -> None:
    kept: dict[int, Tensor] = {}

    def function(x: Tensor, out: Tensor, **args: Any) -> None:
        example.right(x=x, out=out, **args)
        if x.data_ptr() in kept and kept[x.data_ptr()].shape == out.shape:
            out.copy_(kept[x.data_ptr()])
        kept[x.data_ptr()] = out.clone()

    assert kind(function) is Kind.STALE


def test_other_bits_at_the_second_call() -> None:
    calls = 0

    def function(out: Tensor, **args: Any) -> None:
        nonlocal calls
        calls += 1
        example.right(out=out, **args)
        out.view(torch.int16)[0, 0] += calls % 2  # the last bit: well within the tolerance

    assert kind(function) is Kind.NOT_REPEATABLE


def test_other_bits_at_another_address() -> None:
    places: dict[int, int] = {}

    def function(x: Tensor, out: Tensor, **args: Any) -> None:
        example.right(x=x, out=out, **args)
        out.view(torch.int16)[0, 0] += places.setdefault(x.data_ptr(), len(places)) % 2

    assert kind(function) is Kind.DEPENDS_ON_ADDRESS


def test_written_after_the_return_by_a_thread() -> None:
    def function(out: Tensor, **args: Any) -> None:
        def finish() -> None:
            time.sleep(0.005)
            example.right(out=out, **{**args, "total": args["total"].clone()})

        args["total"][args["slots"][args["slots"] >= 0].long()] += args["x"][args["slots"] >= 0].float()
        threading.Thread(target=finish).start()

    # which of them it is depends on when the thread wakes
    assert kind(function) in (Kind.LATE_WRITE, Kind.UNWRITTEN, Kind.THREAD_LEFT, Kind.NOT_REPEATABLE)


def test_a_thread_left_running() -> None:
    stop = threading.Event()

    def function(**args: Any) -> None:
        example.right(**args)
        threading.Thread(target=stop.wait, daemon=True).start()

    try:
        assert kind(function) is Kind.THREAD_LEFT
    finally:
        stop.set()


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda args: args["weight"].mul_(2), Kind.INPUT_MUTATED),
        (lambda args: args["slots"].neg_(), Kind.INPUT_MUTATED),
        (lambda args: args["out"].as_strided((1,), (1,), args["out"].storage_offset() - 3).zero_(), Kind.OUT_OF_BOUNDS),
        (lambda args: args["out"].resize_(args["out"].numel() // 2), Kind.REBOUND),
        (lambda args: args["out"].set_(torch.zeros_like(args["out"])), Kind.REBOUND),
        (lambda args: setattr(args["out"], "__class__", type("Lazy", (Tensor,), {})), Kind.REBOUND),
        (lambda args: args["out"][0].fill_(torch.nan), Kind.NOT_FINITE),
        (lambda args: args["total"][-1].zero_(), Kind.PADDING_TOUCHED),
    ],
    ids=["weight", "slots", "before_beginning", "resized", "set", "subclass", "nan", "somebodys_slot"],
)
def test_conduct(edit: Function, expected: Kind) -> None:
    def function(**args: Any) -> None:
        example.right(**args)
        edit(args)

    found = check(function).failure
    assert found is not None and found.kind is expected


def test_the_gap_between_the_rows_of_a_strided_output() -> None:
    def function(out: Tensor, **args: Any) -> None:
        example.right(out=out, **args)
        if out.stride(0) > out.shape[1]:
            out.as_strided((len(out), out.stride(0)), (out.stride(0), 1))[:-1, -1] = 0

    found = check(function).failure
    assert found is not None
    assert (found.kind, found.regime) == (Kind.OUT_OF_BOUNDS, "strided")
    assert "gaps between its rows" in found.detail


def test_strides_ignored() -> None:
    def function(out: Tensor, **args: Any) -> None:
        packed = out.as_strided(out.shape, (out.shape[1], 1))
        example.right(out=packed, **args)

    found = check(function).failure
    assert found is not None and found.regime == "strided"


def test_padded_row_written_in_the_output() -> None:
    def function(slots: Tensor, out: Tensor, **args: Any) -> None:
        example.right(slots=slots, out=out, **args)
        out[slots < 0] = 0

    found = check(function).failure
    assert found is not None
    assert (found.kind, found.output, found.regime) == (Kind.PADDING_TOUCHED, "out", "padded")


@pytest.mark.parametrize(("axis", "size"), [("context", 8192), ("batch", 3)])
def test_wrong_at_one_size_only(axis: str, size: int) -> None:
    def make(workload: Any) -> Function:
        def function(out: Tensor, **args: Any) -> None:
            example.right(out=out, **args)
            if len(out) == 3 if axis == "batch" else len(out) == 1:  # the edge with context 8192 has one row
                out[-1] *= 1.02

        return function

    found = check(make(None)).failure
    assert found is not None
    assert f"{axis}={'8k' if size == 8192 else size}" in found.workload


def test_the_reference_is_not_called_by_whatever_way() -> None:
    from reference.norms import rms_norm as taken_before

    def by_name(**args: Any) -> None:
        example.right(**args)
        taken_before(args["x"], args["weight"], 1e-6, law().numerics.MODEL)

    def from_a_thread(**args: Any) -> None:
        example.right(**args)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                taken_before(args["x"], args["weight"], 1e-6, law().numerics.MODEL)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def by_executing_its_file(**args: Any) -> None:
        import importlib.util

        example.right(**args)
        spec = importlib.util.find_spec("reference.numerics")
        assert spec is not None and spec.loader is not None
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        again.bf16(args["x"], again.MODEL)

    for function in (by_name, from_a_thread, by_executing_its_file):
        found = check(function).failure
        assert found is not None
        assert found.kind is Kind.CALLS_REFERENCE
    # and the law works again afterwards
    assert taken_before(torch.ones(1, 4).bfloat16(), torch.ones(4).bfloat16(), 1e-6, law().numerics.MODEL).sum() == 4


def test_an_exception_is_the_variants_and_keeps_its_traceback() -> None:
    def function(**args: Any) -> None:
        raise RuntimeError("no kernel image")

    found = check(function).failure
    assert found is not None and found.kind is Kind.RAISED
    assert found.detail == "RuntimeError: no kernel image"
    assert found.traceback is not None and "test_gate.py" in found.traceback

    def leaves(**args: Any) -> None:
        raise SystemExit(0)

    assert kind(leaves) is Kind.RAISED


def test_a_broken_reference_is_not_the_variants_fault() -> None:
    def broken(law: Any, args: Any, precision: Any) -> dict[str, Expected]:
        raise IndexError("off by one")

    def writes(law: Any, args: Any, precision: Any) -> dict[str, Expected]:
        args["x"].zero_()
        return example.reference(law, args, precision)

    for bad, word in ((broken, "off by one"), (writes, "wrote to its argument x")):
        result = gate.check(example.contract(reference=bad), example.variant(example.right), SIZE, seeds=(0,))
        assert result.failure is not None
        assert result.failure.kind is Kind.REFERENCE_BROKE
        assert word in result.failure.detail


def test_a_gate_that_was_tampered_with_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(out: Tensor, **args: Any) -> None:
        example.right(out=out, **args)
        out[0, 0] += 8
        monkeypatch.setattr(judge_module, "_errors", lambda actual, model, oracle: (oracle * 0, oracle * 0, oracle))

    found = check(function).failure
    assert found is not None
    assert found.kind is Kind.TAMPERED, found.sentence


def test_results_that_are_returned_instead_of_written_are_not_written() -> None:
    def function(out: Tensor, **args: Any) -> Tensor:
        mine = torch.empty_like(out)
        example.right(out=mine, **args)
        return mine

    assert kind(function) is Kind.UNWRITTEN


def test_usage() -> None:
    with pytest.raises(UsageError, match="did you mean 'padded'"):
        check(example.right, regimes=("paded",))
    with pytest.raises(UsageError, match="seed"):
        check(example.right, seeds=())
    picky = dataclasses.replace(
        example.variant(example.right), supports=lambda w: "odd batch" if w["batch"] % 2 else None
    )
    with pytest.raises(UsageError, match="odd batch"):
        gate.check(CONTRACT, picky, example.workload(batch=3), seeds=(0,))
    result = gate.check(CONTRACT, picky, SIZE, seeds=(0,))
    assert result.passed
    assert result.skipped == ("batch=3 context=64: odd batch", "batch=1 context=8k: odd batch")


def test_weights_are_prepared_once_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench.registry as registry

    monkeypatch.setattr(registry, "contract", lambda op: CONTRACT)
    prepared = []

    def prepare(workload: Any, weight: Tensor) -> dict[str, Tensor]:
        prepared.append(weight.data_ptr())
        return {"weight": weight.float()}

    def function(weight: Tensor, **args: Any) -> None:
        assert weight.dtype is torch.float32
        example.right(weight=weight.bfloat16(), **args)

    subject = Variant("example", "packs", function, prepare=prepare)
    result = gate.check(CONTRACT, subject, SIZE, seeds=(0,), regimes=("ordinary",), edges=False)
    assert result.passed, result.failure
    assert len(prepared) == 3  # the case, elsewhere in memory, and with one element a row changed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: work on another stream, graph replay")
def test_streams_and_graphs() -> None:
    def on_default(**args: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            example_without_sync(**args)

    def on_another(**args: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            example_without_sync(**args)

    assert check(example_without_sync, device="cuda").graph == "same bits"
    assert check(example.right, device="cuda").graph.startswith("not capturable")
    assert kind(on_default, device="cuda") is Kind.WRONG_STREAM
    assert kind(on_another, device="cuda") in (Kind.WRONG_STREAM, Kind.UNWRITTEN, Kind.WRONG_VALUES)


def example_without_sync(x: Tensor, weight: Tensor, slots: Tensor, total: Tensor, out: Tensor) -> None:
    """The example without a shape that depends on contents, so that it can be captured."""
    live = (slots >= 0)[:, None]
    rows = torch.where(live, x, 0).float()
    normed = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + example.EPS)).bfloat16() * weight
    out.copy_(torch.where(live, normed, out))
    total.index_add_(0, slots.clamp(min=0).long(), rows)
