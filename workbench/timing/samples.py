"""The worker's half of timing: working sets, graph, blocks of raw samples. See `protocol.py` for the protocol.

Clock and event functions are bound when this module is imported, which is before any variant is loaded, so that a
variant that patches `time` or `torch.cuda.Event` patches nothing here. No statistics are computed here.
"""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench import registry
from workbench.contract import Contract, Workload
from workbench.fingerprint import last_level_cache
from workbench.gate.arena import bits, poison, size_in_bytes
from workbench.gate.run import LATE, roomy
from workbench.record import Failure, Mode, Status
from workbench.timing.flush import Flush
from workbench.timing.protocol import CACHES_FILLED, MOST_SETS, SETTINGS
from workbench.variant import Variant

EAGER_SETS = 8
"""Most sets where calls can't be captured: more launches would not fit the GPU's queue."""


class Kept(NamedTuple):
    """Outputs of one timed call, and the seeds of its inputs and of its set's weights."""

    outputs: dict[str, Tensor]
    seed: int
    weight_seed: int


class Timer:
    """One variant on one workload, from its preparation to its samples.

    `parameters` are the tunables' values, `where` is `cuda`, `cpu` or `interpreter`. Times are returned raw, in µs
    a call unless said otherwise.
    """

    def __init__(
        self,
        law: Contract,
        variant: Variant,
        workload: Workload,
        parameters: Mapping[str, Any],
        device: torch.device,
        where: str,
    ) -> None:
        """See the class; nothing is allocated yet."""
        self.law, self.variant, self.workload = law, variant, workload
        self.parameters = dict(parameters)
        self.device = device
        self.cuda = device.type == "cuda"
        self.interpreted = where == "interpreter"
        self.mode = Mode.INTERPRETED if self.interpreted else Mode.CPU
        self.sets: list[dict[str, Any]] = []
        self.seeds: list[int] = []
        self._weight_seeds: list[int] = []
        self.why_eager: str | None = None
        self._flush: Flush | None = None
        self._graphs: tuple[Any, Any] | None = None
        self._events: tuple[Any, Any] | None = None
        self.kept: Kept | None = None
        self.late: str | None = None
        self._sampled, self._room = 0, False
        self._host_s = 0.0
        self._inputs_s = self._call_s = 0.0

    def prepare(self, seed: int) -> dict[str, Any]:
        """Make a first set, run the variant's `prepare` and its first call, each timed on the host, in ms.

        Also says how large a set is (bytes) and how many of them are wanted.
        """
        args = self._inputs(seed)
        self._sync()
        start = perf_counter_ns()
        args = registry.prepare(self.variant, self.workload, args)
        self._sync()
        prepare_ms = (perf_counter_ns() - start) / 1e6
        self._inputs_s = self._timed(lambda: self._inputs(seed + 1))
        call = functools.partial(self._call, args)
        first_ms = self._timed(call) * 1e3
        self._call_s = first_ms / 1e3 if self.interpreted else self._timed(call)
        size = size_in_bytes(args)
        del args, call
        self._release_cache()
        return {
            "prepare_ms": prepare_ms if self.variant.prepare is not None else None,
            "first_call_ms": first_ms,
            "set_bytes": size,
            "sets": 1 if self.interpreted else self._wanted(),
        }

    def set_up(self, seed: int, count: int) -> dict[str, Any]:
        """Make `count` working sets, fewer for a slow variant; warm up on their first contents, capture the graphs.

        Says which mode was taken, why not a graph, and how many sets there are.
        """
        count = 1 if self.interpreted else min(count, max(2, self._at_most(self._call_s)))
        for index in range(count):
            self.sets.append(registry.prepare(self.variant, self.workload, self._inputs(seed + index)))
        self.seeds = [seed + index for index in range(count)]
        self._weight_seeds = list(self.seeds)
        self.kept, self.late, self._sampled = None, None, 0
        self._room = roomy({name: self.sets[0][name] for name in self.law.outputs}, self.device)
        if self.cuda:
            cost = self.law.cost(self.workload)
            self._flush = Flush(self.device, cost.bytes_written / max(1, cost.bytes_read + cost.bytes_written))
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._capture()
        self._warm_up()
        return {
            "mode": self.mode.value,
            "sets": len(self.sets),
            "why_eager": self.why_eager,
            "call_s": self._call_s,
            "sample_s": len(self.sets) * (self._call_s + self._inputs_s),
        }

    def block(self, count: int, seed: int) -> list[float]:
        """`count` samples, each over all sets, with contents from `seed`, `seed` + 1 and so on."""
        samples = []
        for _ in range(count):
            for index, args in enumerate(self.sets):
                self.seeds[index] = seed
                self._renew(args, seed)
                seed += 1
            self._sync()
            samples.append(self._sample(self._all_sets, 0))
            self._keep()
        return samples

    def warm(self, count: int, seed: int) -> list[float]:
        """`count` samples of as many calls on one set, right after the same calls."""
        samples = []
        for index in range(count):
            self._renew(self.sets[0], seed + index)
            self._sync()
            self._one_set()
            samples.append(self._sample(self._one_set, 1))
        return samples

    def calls(self, count: int) -> dict[str, list[float]]:
        """The host's time of `count` single calls, without synchronising (`launch_us`) and with (`call_us`)."""
        launch, call = [], []
        for index in range(count):
            args = self.sets[index % len(self.sets)]
            self._sync()
            start = perf_counter_ns()
            self._call(args)
            launched = perf_counter_ns()
            self._sync()
            launch.append((launched - start) / 1e3)
            call.append((perf_counter_ns() - start) / 1e3)
        return {"launch_us": launch, "call_us": call}

    def span(self, passes: int) -> None:
        """Call on all sets, `passes` times, without a pause, for the parent's clock."""
        for _ in range(passes):
            self._all_sets()
        self._sync()

    def timed_outputs(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Set `index` as the last timed call left it, and the arguments made anew as that call found them."""
        return self.sets[index], self._made(self.seeds[index], self._weight_seeds[index])

    def kept_outputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `timed_outputs`, of the call that was kept; its inputs are as it found them."""
        assert self.kept is not None
        found = self._made(self.kept.seed, self.kept.weight_seed)
        return {**found, **self.kept.outputs}, found

    def _keep(self) -> None:
        """Keep the outputs of one call of the samples taken so far, every sample being as likely as any other.

        It is drawn once the calls have returned: no call can know whether it will be judged. On a CPU the outputs of
        the sample's last call are watched for a while: a thread that works behind comes to them last. (A GPU has been
        waited for.) Where memory is short nothing is kept.
        """
        if not self._room:
            return
        last = {} if self.cuda else {name: self.sets[-1][name].clone() for name in self.law.outputs}
        self._sampled += 1
        index = secrets.randbelow(len(self.sets) * self._sampled)
        if index < len(self.sets):
            copies = {name: self.sets[index][name].clone() for name in self.law.outputs}
            self.kept = Kept(copies, self.seeds[index], self._weight_seeds[index])
            time.sleep(LATE if last else 0.0)
            changed = [name for name, x in last.items() if not torch.equal(bits(x), bits(self.sets[-1][name]))]
            self.late = self.late or next(iter(changed), None)

    def release(self) -> None:
        """Give the memory back."""
        self.sets, self.seeds = [], []
        self._graphs = self._flush = self.kept = None
        self._release_cache()

    def _made(self, seed: int, weight_seed: int) -> dict[str, Any]:
        """The arguments of a timed call, made anew."""
        weights = self._inputs(weight_seed) if self.law.weights else {}
        return {**self._inputs(seed), **{name: weights[name] for name in self.law.weights}}

    def _inputs(self, seed: int) -> dict[str, Any]:
        args = self.law.make_inputs(self.workload, seed, "ordinary", self.device)
        for name, output in self.law.outputs.items():
            if not output.inout:
                bits(args[name]).fill_(poison(args[name].dtype))
        return args

    def _renew(self, args: dict[str, Any], seed: int) -> None:
        """Put new contents in place of the old ones: inputs, states, caches; weights stay, outputs are poisoned."""
        fresh = self._inputs(seed)
        for name, value in fresh.items():
            if name in self.law.weights:
                continue
            if isinstance(value, Tensor):
                if value.shape != args[name].shape:
                    shapes = f"{tuple(args[name].shape)} and {tuple(value.shape)}"
                    raise Failure(Status.REFERENCE_BROKE, f"make_inputs gives {name} the shapes {shapes} for two seeds")
                args[name].copy_(value)
            elif isinstance(value, (int, float, str)) and value != args[name]:
                raise Failure(Status.REFERENCE_BROKE, f"make_inputs gives {name} other values for other seeds")

    def _call(self, args: Mapping[str, Any]) -> None:
        self.variant.function(**args, **self.parameters)

    def _all_sets(self) -> None:
        if self._graphs is not None:
            self._graphs[0].replay()
        else:
            for args in self.sets:
                self._call(args)

    def _one_set(self) -> None:
        if self._graphs is not None:
            self._graphs[1].replay()
        else:
            for _ in self.sets:
                self._call(self.sets[0])

    def _sample(self, run: Callable[[], None], warm: int) -> float:
        """Time of `run` over the number of sets, µs."""
        if not self.cuda:
            begin = perf_counter_ns()
            run()
            return (perf_counter_ns() - begin) / 1e3 / len(self.sets)
        assert self._events is not None and self._flush is not None
        start, end = self._events
        self._flush.occupy(2 * self._host_s)
        if warm:
            run()
        else:
            self._flush.clear()
        start.record()
        run()
        end.record()
        self._sync()
        return float(start.elapsed_time(end)) * 1e3 / len(self.sets)

    def _capture(self) -> None:
        """Capture all sets' calls, and as many calls on one set, as two graphs; else stay with launches."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for args in self.sets[:2] * 2:
                self._call(args)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._sync()
        graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        try:
            with torch.cuda.graph(graphs[0], stream=stream):
                for args in self.sets:
                    self._call(args)
            with torch.cuda.graph(graphs[1], stream=stream):
                for _ in self.sets:
                    self._call(self.sets[0])
        except Exception as fault:  # a foreign call may refuse capture in any way; a lost context raises again below
            self._sync()
            self.mode = Mode.EAGER
            self.why_eager = str(fault).strip().splitlines()[0][:200] if str(fault).strip() else type(fault).__name__
            del self.sets[EAGER_SETS:], self.seeds[EAGER_SETS:]
        else:
            self._sync()
            self.mode = Mode.GRAPH
            self._graphs = graphs

    def _warm_up(self) -> None:
        """Run all sets for a while, so that clocks are up and lazy loading is done; then time one run on the host."""
        end = perf_counter_ns() + int(SETTINGS[self.mode.value].warm_up_s * 1e9)
        while perf_counter_ns() < end:
            self._all_sets()
            self._sync()
        if self.cuda:
            start = perf_counter_ns()
            self._all_sets()
            self._host_s = (perf_counter_ns() - start) / 1e9
            self._sync()
            self._call_s = self._timed(self._all_sets) / len(self.sets)

    def _wanted(self) -> int:
        """How many sets fill the caches several times, as far as making their contents takes no longer than it may."""
        cost = self.law.cost(self.workload)
        cache = Flush.l2_bytes(self.device) if self.cuda else last_level_cache()
        filling = math.ceil(CACHES_FILLED * cache / max(1, cost.bytes_read + cost.bytes_written))
        return max(2, min(filling, MOST_SETS, self._at_most(self._inputs_s)))

    def _at_most(self, seconds: float) -> int:
        """How many times something that takes so long may be done for one sample."""
        settings = SETTINGS[(Mode.GRAPH if self.cuda else Mode.CPU).value]
        return int(settings.renewal_s / max(1e-6, seconds))

    def _timed(self, run: Callable[[], Any]) -> float:
        """Host seconds of `run`, synchronised."""
        self._sync()
        start = perf_counter_ns()
        run()
        self._sync()
        return (perf_counter_ns() - start) / 1e9

    def _sync(self) -> None:
        if self.cuda:
            _synchronize(self.device)

    def _release_cache(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()


_synchronize = torch.cuda.synchronize
