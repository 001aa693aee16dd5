"""The child's side of `worker.py`: `python -m workbench.worker_process <fd> <device>`.

Reads a request, answers a record, until the parent closes the socket. The timing module is imported, and with it the
clock and event functions it uses, before any variant is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from workbench import fingerprint, registry
from workbench.contract import Workload, contract
from workbench.errors import UsageError
from workbench.gate import check
from workbench.gate.result import Failure as Found
from workbench.gate.result import Kind
from workbench.gate.seal import Seal
from workbench.record import Failure, Status
from workbench.timing import afterwards
from workbench.timing.samples import Timer

GRACE_S = 10.0
"""How much longer than the parent waits a request may run before the process ends itself."""

BUILD_ERRORS = (
    "CompilationError",
    "CompileError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "OutOfResources",
    "PTXASError",
    "BackendCompilerFailed",
    "InductorError",
    "CppCompileError",
    "InternalTorchDynamoError",
    "TVMError",
    "CalledProcessError",
)
"""Names of exception classes by which compilers give up (Triton, Inductor, TileLang, nvcc by subprocess)."""


class Session:
    """What the worker holds between requests."""

    def __init__(self, device: torch.device) -> None:
        """See the class."""
        self.device = device
        self.timer: Timer | None = None
        self.seal = Seal()
        self.given: dict[str, Any] = {}

    def hello(self) -> dict[str, Any]:
        """Facts of the machine, memory, and the GPU's UUID."""
        facts = fingerprint.machine(str(self.device))
        uuid = None
        if self.device.type == "cuda":
            uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")) or None
        return {"pid": os.getpid(), "machine": facts, "uuid": uuid}

    def entries(self, op: str, plugins: list[str]) -> dict[str, Any]:
        """The op's variants by name: tunables with their choices as texts, or why it can't be loaded."""
        found = [
            {
                "name": entry.name,
                "reason": entry.reason,
                "tunables": {
                    name: [str(choice) for choice in choices]
                    for name, choices in (entry.variant.tunables if entry.variant else {}).items()
                },
            }
            for entry in registry.entries(op, plugins)
        ]
        return {"entries": found}

    def load(
        self, variant: str, workload: dict[str, Any], parameters: dict[str, Any], plugins: list[str]
    ) -> dict[str, Any]:
        """Load a variant for a workload."""
        self.release()
        size = Workload(workload["op"], tuple((n, v) for n, v in workload["axes"]), workload["preset"])
        law = contract(size.op)
        self.seal.extend()
        try:
            found = registry.find(size.op, variant, plugins)
        except UsageError as mistake:
            raise Failure(Status.UNAVAILABLE, str(mistake)) from None
        reason = registry.refusal(found, None, self.device)
        if reason is not None:
            raise Failure(Status.UNAVAILABLE, reason)
        reason = registry.refusal(found, size, self.device)
        if reason is not None:
            raise Failure(Status.REFUSED, reason)
        where = registry.place(found, self.device)
        self.given = parameters
        resolved = registry.parameters(found, size, parameters)
        self.timer = Timer(law, found, size, resolved, self.device, where)
        return {
            "parameters": resolved,
            "source_hash": found.source_hash,
            "origin": found.origin,
            "where": where,
        }

    def gate(self, seeds: list[int], regimes: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
        """Run the gate on what was loaded.

        Raises Failure where an exception of the variant says more than "raised": no memory, no build, a lost context.
        """
        timer = self._loaded()
        result = check(
            timer.law,
            timer.variant,
            timer.workload,
            seeds=seeds,
            regimes=regimes,
            device=self.device,
            parameters=self.given,
            **options,
        )
        failure = result.failure
        if failure is not None and failure.kind is Kind.RAISED:
            status = status_of({failure.detail.partition(":")[0]}, failure.detail)
            if status is not Status.RAISED:
                raise Failure(status, failure.detail[:300], failure.traceback or "")
        broken = self.seal.broken()
        if failure is None and broken is not None:
            result = dataclasses.replace(result, failure=Found(Kind.TAMPERED, broken, workload=timer.workload.label))
        self._empty_cache()
        return result.to_json()

    def prepare(self, seed: int) -> dict[str, Any]:
        """The one-off work before the first call, timed; the size of a working set."""
        return self._loaded().prepare(seed)

    def memory(self) -> dict[str, Any]:
        """Free bytes of the device, or of the machine for the CPU."""
        self._empty_cache()
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return {"free": free, "total": total}
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as file:
            pages = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
        return {"free": pages, "total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}

    def set_up(self, seed: int, count: int) -> dict[str, Any]:
        """Working sets and graphs."""
        return self._loaded().set_up(seed, count)

    def block(self, count: int, seed: int) -> dict[str, Any]:
        """Raw samples, µs a call."""
        return {"samples_us": self._loaded().block(count, seed)}

    def warm(self, count: int, seed: int) -> dict[str, Any]:
        """Raw samples with everything in the caches."""
        return {"samples_us": self._loaded().warm(count, seed)}

    def calls(self, count: int) -> dict[str, Any]:
        """Host times of single calls."""
        return self._loaded().calls(count)

    def span(self, passes: int) -> dict[str, Any]:
        """Passes over all sets without a pause, for the parent's clock."""
        self._loaded().span(passes)
        return {}

    def pause(self) -> dict[str, Any]:
        """Nothing: what a request costs by itself."""
        return {}

    def judge(self, index: int) -> dict[str, Any]:
        """Hold a timed call against the law: inputs by set `index` of the last sample, outputs by those kept."""
        timer = self._loaded()
        seed, (left, found) = timer.seeds[index], timer.timed_outputs(index)
        wrong = afterwards.changed_input(timer.law, left, found)
        if timer.kept is not None:
            seed, left, found = timer.kept.seed, *timer.kept_outputs()
        wrong = wrong or afterwards.wrong_output(timer.law, left, found, self.device)
        if timer.late is not None:
            wrong = f"output {timer.late} of a timed call: it changed after the call had returned"
        broken = self.seal.broken()
        if wrong is None and broken is not None:
            wrong = f"{Kind.TAMPERED.value}: {broken}"
        return {"wrong": wrong, "seed": seed}

    def ceilings(self, seconds: float) -> dict[str, Any]:
        """What this machine can do at best."""
        from workbench.timing.ceilings import measure

        return measure(self.device, seconds)

    def release(self) -> dict[str, Any]:
        """Give the working sets' memory back."""
        if self.timer is not None:
            self.timer.release()
        self._empty_cache()
        return {}

    def _loaded(self) -> Timer:
        if self.timer is None:
            raise Failure(Status.REFERENCE_BROKE, "no variant is loaded")
        return self.timer

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def status_of(names: set[str], text: str) -> Status:
    """The status for an exception of classes called `names` that says `text`."""
    if names & {"MemoryError", "OutOfMemoryError"} or "can't allocate memory" in text:
        return Status.OUT_OF_MEMORY
    if names & set(BUILD_ERRORS):
        return Status.DID_NOT_BUILD
    if "CUDA error" in text or names & {"AcceleratorError", "CUDADriverError"}:
        return Status.CUDA_ERROR
    return Status.RAISED


def explained(fault: BaseException) -> dict[str, Any]:
    """A foreign exception as a status with its reason; `lost` says that this process can't go on."""
    if isinstance(fault, Failure):
        lost = fault.status in (Status.OUT_OF_MEMORY, Status.CUDA_ERROR)
        return {"status": fault.status.value, "reason": fault.reason, "detail": fault.detail, "lost": lost}
    text = str(fault).strip()
    status = status_of({kind.__name__ for kind in type(fault).__mro__}, text)
    if isinstance(fault, UsageError):
        status = Status.REFUSED
    elif type(fault).__name__ == "ReferenceBroke":
        status = Status.REFERENCE_BROKE
    first = text.splitlines()[0] if text else ""
    return {
        "status": status.value,
        "reason": f"{type(fault).__name__}: {first}"[:300],
        "detail": "".join(traceback.format_exception(type(fault), fault, fault.__traceback__))[-6000:],
        "lost": status in (Status.OUT_OF_MEMORY, Status.CUDA_ERROR),
    }


def answer(requests: dict[str, Callable[..., dict[str, Any]]], message: dict[str, Any]) -> dict[str, Any]:
    """Do one request; whatever a foreign kernel raises becomes part of the answer."""
    try:
        return {"answer": requests[message.pop("what")](**message)}
    except BaseException as fault:  # SystemExit of a variant included: it must cost a row, not the sweep
        return {"failure": explained(fault)}


def follow(parent: int) -> None:
    """End this process, and the compilers it started, once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve the parent until it goes away."""
    descriptor, device = int(sys.argv[1]), torch.device(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    faulthandler.enable()
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    registry.interpret_without_gpu()
    torch.set_grad_enabled(False)
    session = Session(device)
    public = [name for name in vars(Session) if not name.startswith("_")]
    requests = {name: getattr(session, name) for name in public}
    send, receive = json.dumps, json.loads
    with Connection(descriptor) as pipe:
        while True:
            try:
                message = receive(pipe.recv_bytes())
            except EOFError:
                return
            # a C thread of its own, so it works even where a hung call never gives the interpreter back
            faulthandler.dump_traceback_later(message.pop("within") + GRACE_S, exit=True)
            pipe.send_bytes(send(answer(requests, message)).encode())
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
