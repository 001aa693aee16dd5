"""The worker's half of timing on a CPU, the limits, and what is judged afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import fingerprint
from workbench.contract import Cost, contract
from workbench.gate.arena import bits, poison
from workbench.race import Block
from workbench.record import Failure, Mode, Status
from workbench.timing import ceilings, flush, protocol, samples
from workbench.timing.afterwards import judge
from workbench.timing.limits import Ceilings, limit_us
from workbench.timing.samples import Timer
from workbench.variant import Variant

CPU = torch.device("cpu")


def timer(body: Callable[..., None], *, where: str = "cpu", **fields: Any) -> Timer:
    law = contract("residual_rmsnorm")
    made = Variant(op=law.name, name="mine", function=body, **fields)
    return Timer(law, made, law.workload(tokens=2, hidden=64), {}, CPU, where)


def right(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    residual += branch * scale
    wide = residual.float()
    torch.mul((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16), weight, out=out)


def test_a_variant_from_preparation_to_samples() -> None:
    made = timer(right)
    first = made.prepare(1)
    assert first["prepare_ms"] is None and first["first_call_ms"] > 0
    assert first["set_bytes"] == (3 * 2 * 64 + 64) * 2
    said = made.set_up(10, 3)
    assert (said["mode"], said["sets"], said["why_eager"]) == (Mode.CPU.value, 3, None)
    times = made.block(4, 1000)
    assert len(times) == 4 and min(times) > 0
    assert made.seeds == [1009, 1010, 1011]
    assert len(made.warm(2, 5000)) == 2
    assert {name: len(times) for name, times in made.calls(5).items()} == {"launch_us": 5, "call_us": 5}


def test_contents_are_new_for_each_call_and_outputs_poisoned() -> None:
    seen: list[tuple[bytes, bool]] = []
    addresses: set[int] = set()

    def spy(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
        poisoned = bool((bits(out) == poison(out.dtype)).all())
        seen.append((bits(branch).numpy().tobytes() + bits(residual).numpy().tobytes(), poisoned))
        addresses.add(out.data_ptr())
        right(branch, residual, weight, out, scale)

    made = timer(spy)
    made.prepare(1)
    made.set_up(10, 3)
    before = {contents for contents, _ in seen}
    seen.clear()
    addresses.clear()
    made.block(3, 1000)
    assert len(seen) == 9 and len({contents for contents, _ in seen}) == 9 and len(addresses) == 3
    assert not before & {contents for contents, _ in seen}
    assert all(poisoned for _, poisoned in seen)


def test_weights_stay_and_prepare_runs_once_a_set() -> None:
    calls: list[int] = []

    def pack(workload: Any, weight: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        return {"weight": weight.float()}

    kept: set[int] = set()

    def body(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
        assert weight.dtype is torch.float32
        kept.add(weight.data_ptr())
        right(branch, residual, weight.to(torch.bfloat16), out, scale)

    made = timer(body, prepare=pack)
    assert made.prepare(1)["prepare_ms"] >= 0
    kept.clear()
    made.set_up(10, 2)
    made.block(3, 1000)
    assert len(calls) == 3 and len(kept) == 2
    assert judge(made.law, *made.timed_outputs(1), CPU) is None


def test_interpreted_takes_one_set() -> None:
    made = timer(right, where="interpreter")
    made.prepare(1)
    assert made.set_up(10, 5)["sets"] == 1
    assert made.mode is Mode.INTERPRETED


def test_timed_outputs_are_judged_by_the_gate() -> None:
    made = timer(right)
    made.prepare(1)
    made.set_up(10, 2)
    made.block(2, 1000)
    assert judge(made.law, *made.timed_outputs(0), CPU) is None
    left, found = made.timed_outputs(1)
    left["out"][1, 3] += 0.5
    assert "output out of a timed call: wrong values" in str(judge(made.law, left, found, CPU))
    left, found = made.timed_outputs(0)
    left["branch"][0, 0] += 1
    assert judge(made.law, left, found, CPU) == "a timed call changed its input branch"
    stale = timer(lambda branch, residual, weight, out, scale: None)
    stale.prepare(1)
    stale.set_up(10, 2)
    stale.block(1, 1000)
    assert judge(stale.law, *stale.timed_outputs(0), CPU) is not None


def test_any_timed_call_may_be_the_one_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that knows the last sample of a block and works only there."""
    draws = iter((1, 4, 5))  # of two sets: the second of the first sample, then none of later ones
    monkeypatch.setattr(samples.secrets, "randbelow", lambda below: next(draws))
    calls: list[int] = []

    def body(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
        calls.append(1)
        if len(calls) > 4:
            right(branch, residual, weight, out, scale)

    made = timer(body)
    made.prepare(1)
    made.set_up(10, 2)
    calls.clear()
    made.block(3, 1000)
    assert judge(made.law, *made.timed_outputs(1), CPU) is None
    assert made.kept is not None and made.kept.seed == 1001
    assert "output residual of a timed call" in str(judge(made.law, *made.kept_outputs(), CPU))
    made.release()
    assert made.kept is None


def test_inputs_of_another_shape_are_our_own_fault() -> None:
    made = timer(right)
    made.prepare(1)
    made.set_up(10, 1)
    fine = made._inputs
    made._inputs = lambda seed: {**fine(seed), "branch": torch.zeros(3, 64)}  # type: ignore[method-assign]
    with pytest.raises(Failure, match="shapes") as raised:
        made.block(1, 5)
    assert raised.value.status is Status.REFERENCE_BROKE


GPU = Ceilings("GPU", read_bytes_per_s=4e12, copy_bytes_per_s=3e12, flops_per_s={"bf16": 8e14, "fp8": None})


def test_limits() -> None:
    assert limit_us(Cost(0, 4_000_000, 0), GPU) == pytest.approx(1.0)
    assert limit_us(Cost(0, 3_000_000, 3_000_000), GPU) == pytest.approx(2.0)
    assert limit_us(Cost(0, 5_000_000, 3_000_000), GPU) == pytest.approx(2.5)
    assert limit_us(Cost(0, 0, 3_000_000), GPU) == pytest.approx(1.0)
    assert limit_us(Cost(8e9, 1, 1), GPU) == pytest.approx(10.0)
    assert limit_us(Cost(8e9, 4_000_000, 0, rate="fp8"), GPU) == pytest.approx(1.0)
    assert limit_us(Cost(8e9, 1, 1, rate="fp8"), Ceilings("?", None, None, {})) is None


def test_ceilings_of_this_machine() -> None:
    found = Ceilings.from_json({**ceilings.measure(CPU, 0.2), "unknown": 1})
    assert found.read_bytes_per_s and found.copy_bytes_per_s and found.flops_per_s["bf16"]
    assert 1e8 < found.copy_bytes_per_s < 1e13
    assert "GB/s" in found.label


def test_fingerprint() -> None:
    facts = fingerprint.machine("cpu")
    assert facts["protocol"] == protocol.VERSION and facts["gpu"] is None and facts["cores"] >= 1
    assert fingerprint.key(facts) == fingerprint.key(dict(reversed(facts.items())))
    assert fingerprint.key({**facts, "driver": "1.2"}) != fingerprint.key(facts)
    one, other = fingerprint.sources("linear"), fingerprint.sources("linear", [os.__file__])
    assert one == fingerprint.sources("linear") != other
    assert fingerprint.throttle_reasons(0x44) == ["power cap", "thermal (hardware)"]
    assert set(fingerprint.Conditions(None).read()) <= {"load"}


def test_the_protocol_is_told_in_ten_lines() -> None:
    assert protocol.__doc__ is not None
    numbered = [line for line in protocol.__doc__.splitlines() if line[:2].strip(" .").isdigit()]
    assert len(numbered) == 10
    assert set(protocol.SETTINGS) == {mode.value for mode in Mode}


def test_events_are_recorded_in_one_place() -> None:
    """`samples.py` times variants and `ceilings.py` the machine; nobody else makes an event."""
    room = fingerprint.ROOT / "workbench"
    users = {path.name for path in room.rglob("*.py") if "Event(" in path.read_text()}
    assert {"samples.py", "ceilings.py"} <= users
    assert not {path.name for path in (room / "cli").glob("*.py") if "Event(" in path.read_text()}


def test_blocks_hold_raw_samples() -> None:
    assert Block((1.0, 2.0), 0.1).conditions == {}


class StandIn:
    """Enough of `torch.cuda` to walk the GPU's path without one; notes what was done in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capturable: bool) -> None:
        """Put it in place of `torch.cuda`."""
        log: list[str] = []
        self.log = log

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.enable_timing = enable_timing

            def record(self) -> None:
                log.append("event")

            def elapsed_time(self, other: Any) -> float:
                return 0.3

        class Graph:
            def replay(self) -> None:
                log.append("replay")

        class Stream(contextlib.nullcontext[None]):
            def __init__(self, device: Any = None) -> None:
                super().__init__()

            def wait_stream(self, other: Any) -> None:
                log.append("wait")

        @contextlib.contextmanager
        def graph(made: Any, stream: Any) -> Any:
            log.append("capture")
            yield
            if not capturable:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        properties = type("Properties", (), {"L2_cache_size": 4096})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(samples, "_synchronize", lambda device: None)
        monkeypatch.setattr(flush, "_driver", lambda: None)
        clear = flush.Flush.clear

        def noted_clear(self: flush.Flush) -> None:
            log.append("clear")
            clear(self)

        monkeypatch.setattr(flush.Flush, "clear", noted_clear)
        short = dataclasses.replace(protocol.SETTINGS["graph"], warm_up_s=0.0)
        monkeypatch.setitem(protocol.SETTINGS, "graph", short)
        monkeypatch.setitem(protocol.SETTINGS, "eager", short)


def test_the_order_of_things_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, capturable=True)
    made = timer(right)
    made.cuda = True
    assert made.prepare(1)["sets"] >= 2
    assert made.set_up(10, 3)["mode"] == "graph"
    assert stand_in.log.count("capture") == 2
    stand_in.log.clear()
    assert made.block(1, 100) == [pytest.approx(100.0)]  # 0.3 ms over three calls
    assert stand_in.log == ["sleep", "clear", "event", "replay", "event"]
    stand_in.log.clear()
    made.warm(1, 100)
    assert stand_in.log == ["replay", "sleep", "replay", "event", "replay", "event"]
    made.calls(2)
    made.release()
    assert made.sets == []


def test_what_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, capturable=False)
    made = timer(right)
    made.cuda = True
    made.prepare(1)
    said = made.set_up(10, 20)
    assert (said["mode"], said["sets"]) == ("eager", samples.EAGER_SETS)
    assert said["why_eager"] == "operation not permitted when stream is capturing"
    stand_in.log.clear()
    assert len(made.block(2, 100)) == 2
    assert "replay" not in stand_in.log
    assert judge(made.law, *made.timed_outputs(7), CPU) is None
