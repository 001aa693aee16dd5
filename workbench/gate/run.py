"""One variant on one case: every run the gate makes of it, and the first thing found wrong.

The order matters. The variant first answers a decoy (other contents at the same addresses, so that a result kept
from an earlier call shows), then the case itself, then the case again elsewhere in memory; only then is the
law evaluated, so that there is no right answer in memory to be found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench import registry
from workbench.contract import Expected
from workbench.gate import watch
from workbench.gate.answers import Answers, Case, ReferenceBroke
from workbench.gate.arena import Arena, bits, layout, poison, rebuild, size_in_bytes
from workbench.gate.judge import judge
from workbench.gate.result import STALE_KINDS, Failure, Kind
from workbench.variant import Variant

DECOY = 7_368_787
"""Added to a case's seed for the decoy's; a prime far from the seeds people use."""
LATE = 0.03
"""Seconds waited once a workload for a write that comes after the return."""
REPEATS = 3
"""Calls repeated at the same place."""

_BREACHES = {"rebound": Kind.REBOUND, "input": Kind.INPUT_MUTATED, "bounds": Kind.OUT_OF_BOUNDS}


class _Found(Exception):
    """Ends a case with its failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


@dataclasses.dataclass
class Report:
    """What one case came to; `graph` is a fact, not a judgement."""

    failure: Failure | None = None
    margin: float | None = None
    graph: str | None = None


def run_case(
    variant: Variant,
    case: Case,
    answers: Answers,
    *,
    parameters: Mapping[str, Any],
    thorough: bool = True,
    first: bool = True,
) -> Report:
    """Run and judge one case.

    `thorough` adds the decoy, the repeats and everything watched; without it the variant runs once and its
    outputs are judged. `first` marks the first case of a workload, which gets the checks that cost the most.
    """
    run = _Run(variant, case, answers, parameters)
    try:
        run.go(thorough, first)
    except _Found as found:
        failure = dataclasses.replace(found.failure, regime=case.regime, seed=case.seed, workload=case.workload.label)
        return Report(failure, run.margin, run.graph)
    except ReferenceBroke as broke:
        text = "".join(traceback.format_exception(type(broke), broke, broke.__traceback__))
        failure = Failure(
            Kind.REFERENCE_BROKE,
            str(broke),
            regime=case.regime,
            seed=case.seed,
            workload=case.workload.label,
            traceback=text,
        )
        return Report(failure, run.margin, run.graph)
    return Report(None, run.margin, run.graph)


class _Run:
    def __init__(self, variant: Variant, case: Case, answers: Answers, parameters: Mapping[str, Any]) -> None:
        self.variant, self.case, self.answers, self.parameters = variant, case, answers, parameters
        self.contract, self.device = answers.contract, answers.device
        self.margin: float | None = None
        self.graph: str | None = None
        self.warm = False
        self.prepared: dict[Arena, dict[str, Any]] = {}
        self.fixed = {*self.contract.weights, *(n for n, o in self.contract.outputs.items() if not o.inout)}

    def go(self, thorough: bool, first: bool) -> None:
        args = self.answers.inputs(self.case)
        arena = Arena(args, self.contract.outputs)
        if not thorough:
            self.call(arena)
            found = arena.snapshot()
            self.breach(arena, args)
            self.judge(found, args, self.answers.expected(self.case), None)
            return
        decoy = self.decoy(args)
        arena.load(decoy)
        self.call(arena)
        self.breach(arena, decoy)
        stale = arena.snapshot()
        arena.load(args)
        found = self.call_watched(arena, wait=first)
        self.breach(arena, args)
        unlike = self.repeats(arena, args, found, profile=first)
        if unlike is None and self.device.type == "cuda":
            with self.blamed():
                unlike = self.on_streams(arena, args, decoy, found)
        self.judge(found, args, self.answers.expected(self.case), stale)
        if unlike is not None:  # only now: that a value is wrong, or stale, says more
            raise _Found(unlike)
        if first and roomy(args, self.device):
            self.nudged(args, found)

    def decoy(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Other contents of the same layout; the same weights where they are prepared once."""
        other = self.answers.inputs(dataclasses.replace(self.case, seed=self.case.seed + DECOY))
        if self.variant.prepare is not None:
            other = {**other, **{name: args[name] for name in self.contract.weights}}
        return other if layout(other) == layout(args) else nudge(args, self.fixed)

    def launch(self, arena: Arena) -> None:
        """Call the variant and nothing else; weights are prepared once for each place they lie at."""
        with torch.no_grad():
            if arena not in self.prepared:
                prepare = self.variant.prepare is not None
                self.prepared[arena] = (
                    registry.prepare(self.variant, self.case.workload, arena.args) if prepare else arena.args
                )
            self.variant.function(**self.prepared[arena], **self.parameters)

    def call(self, arena: Arena, *, profile: bool = False) -> None:
        """Call the variant on the arena and wait for the caller's stream; whatever it raises is its failure."""
        calls: list[str] = []
        with self.blamed():
            try:
                with watch.law_forbidden(), watch.profiled(calls) if profile else contextlib.nullcontext():
                    self.launch(arena)
            except watch.CallsReference as called:
                calls = [str(called)]
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        if calls:
            raise _Found(Failure(Kind.CALLS_REFERENCE, f"it called {calls[0]}, the law it is held against"))
        self.warm = True

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Within this context an exception is the variant's failure."""
        try:
            yield
        except _Found:
            raise
        except (Exception, SystemExit) as error:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            line = (str(error).strip().splitlines() or [""])[0]
            raise _Found(Failure(Kind.RAISED, f"{type(error).__name__}: {line}", traceback=text)) from None

    def call_watched(self, arena: Arena, *, wait: bool) -> dict[str, Tensor]:
        """Call, and see that nothing is still at work when it returns."""
        warm, threads = self.warm, set(threading.enumerate())
        self.call(arena)
        left = watch.new_threads(threads)
        found = arena.snapshot()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if wait or left:
            time.sleep(LATE)
        late = watch.differing(found, arena.snapshot())
        if late is not None:
            kind = Kind.WRONG_STREAM if self.device.type == "cuda" and not left else Kind.LATE_WRITE
            raise _Found(_differs(kind, "it changed after the call had returned", late))
        # a compiler may start threads at the first call; at a later one nobody has reason to
        if left and warm:
            raise _Found(Failure(Kind.THREAD_LEFT, f"{', '.join(left)} still ran when the call returned"))
        return found

    def breach(self, arena: Arena, args: Mapping[str, Any]) -> None:
        """Fail on anything but outputs written."""
        breach = arena.inspect(lambda: args)
        if breach is not None:
            raise _Found(Failure(_BREACHES[breach.what], breach.detail, breach.argument, breach.index))

    def repeats(
        self, arena: Arena, args: Mapping[str, Any], found: Mapping[str, Tensor], *, profile: bool
    ) -> Failure | None:
        """The same contents elsewhere in memory, and again at the same place: the same bits, or why not."""
        elsewhere = None
        enough = roomy(args, self.device)
        if enough:
            other = Arena(args, self.contract.outputs)
            self.call(other, profile=profile)
            elsewhere = watch.differing(found, other.snapshot())
            self.breach(other, args)
            self.prepared.pop(other, None)
        # on a GPU a race shows only now and then; on a CPU once more elsewhere is enough, if that agreed
        for _ in range(0 if enough and elsewhere is None and self.device.type == "cpu" else REPEATS):
            arena.bring(args, inputs=False)
            self.call(arena, profile=profile)
            again = watch.differing(found, arena.snapshot())
            if again is not None:
                return _differs(Kind.NOT_REPEATABLE, "the same call gave other bits", again)
        if elsewhere is not None:
            text = "the same contents at other addresses gave other bits"
            return _differs(Kind.DEPENDS_ON_ADDRESS, text, elsewhere)
        return None

    def on_streams(
        self, arena: Arena, args: Mapping[str, Any], decoy: Mapping[str, Any], found: Mapping[str, Tensor]
    ) -> Failure | None:
        """On a side stream with late inputs, and under graph replay: the same bits, or why not."""
        late = watch.side_stream(lambda: self.launch(arena), arena, decoy, args, self.device)
        wrong = watch.differing(found, late)
        if wrong is not None:
            text = "on a stream of its own, with inputs that come late, its outputs are not those of an ordinary call"
            return _differs(Kind.WRONG_STREAM, text, wrong)
        replayed = watch.graph_replay(lambda: self.launch(arena), arena, decoy, args, self.device)
        if isinstance(replayed, str):
            self.graph = replayed
            return None
        wrong = watch.differing(found, replayed)
        if wrong is not None:
            text = "replayed on new contents at the same addresses it gives other bits than when called"
            return _differs(Kind.GRAPH_DIFFERS, text, wrong)
        self.graph = "same bits"
        return None

    def judge(
        self,
        found: Mapping[str, Tensor],
        args: Mapping[str, Any],
        expected: tuple[Mapping[str, Expected], Mapping[str, Expected]],
        stale: Mapping[str, Tensor] | None,
    ) -> None:
        """Hold the outputs against the law."""
        model, oracle = expected
        for name, rule in self.contract.outputs.items():
            before = args[name] if rule.inout else poisoned(args[name])
            try:
                verdict = judge(rule, found[name], before, model[name], oracle.get(name))
            except ValueError as broke:
                raise ReferenceBroke(f"{name}: {broke}") from broke
            self.margin = max(self.margin or 0.0, verdict.margin)
            if verdict.kind is None:
                continue
            kind, detail = verdict.kind, verdict.detail
            if kind in STALE_KINDS:
                now = _rows(found[name], model[name].touched)
                if now.numel() > 1 and bool((now == now.reshape(-1)[0]).all()):
                    detail = f"one value everywhere; {detail}"
                elif stale is not None and torch.equal(now, _rows(stale[name], model[name].touched)):
                    kind, detail = Kind.STALE, "bit for bit the output of the call before, on other contents"
            fields = {f.name: getattr(verdict, f.name) for f in dataclasses.fields(verdict)}
            fields = {k: fields[k] for k in ("index", "got", "expected", "error", "allowed", "share")}
            raise _Found(Failure(kind, detail, name, **fields))

    def nudged(self, args: Mapping[str, Any], found: Mapping[str, Tensor]) -> None:
        """Change one element of every row of every input: an output kept under a fingerprint shows."""
        other = nudge(args, self.fixed)
        expected = self.answers.evaluate(other, self.case.label + " with one element a row changed")
        arena = Arena(args, self.contract.outputs)
        self.call(arena)
        arena.load(other)
        self.call(arena)
        self.judge(arena.snapshot(), other, expected, found)


def _differs(kind: Kind, text: str, where: tuple[str, tuple[int, ...], float]) -> Failure:
    name, index, share = where
    return Failure(kind, text, name, index, share=share)


def roomy(args: Mapping[str, Any], device: torch.device) -> bool:
    """Whether a second copy of the arguments, and what surrounds it, fits in the memory that is free."""
    return size_in_bytes(args) * 4 < free_bytes(device)


def nudge(args: Mapping[str, Any], fixed: set[str]) -> dict[str, Any]:
    """The arguments with one element in every row of the matrices among them multiplied by −4.

    Only floating-point tensors of two or more dimensions, not those named in `fixed`: that is legal everywhere
    there, while a vector may hold a temperature or a share. Each tensor has the element at another place of
    the row, so that the changes of two factors do not cancel.
    """
    turn = itertools.count()

    def change(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().clone()
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.ndim >= 2 and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32) and tensor.numel():
            column = (tensor.shape[-1] * 2 // 3 + 7 * next(turn)) % tensor.shape[-1]
            twin[..., column] *= -4
        return twin

    return {name: value if name in fixed else rebuild(value, change) for name, value in args.items()}


def poisoned(like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` that holds nothing but poison, in one element of memory."""
    one = torch.zeros(1, dtype=like.dtype, device=like.device)
    bits(one).fill_(poison(like.dtype))
    return one.expand(like.shape)


def free_bytes(device: torch.device) -> int:
    """Memory that may still be had on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def _rows(output: Tensor, touched: Tensor | None) -> Tensor:
    """The bits of what the law touches of an output."""
    return bits(output) if touched is None else bits(output)[touched.to(output.device).nonzero(as_tuple=True)]
