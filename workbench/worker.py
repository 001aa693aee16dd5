"""A variant's own process, seen from the parent: what it is asked, how long it may take, how it can end.

The child (`worker_process.py`) answers one request at a time over a socket, in JSON: the parent never unpickles what
a foreign kernel's process wrote. Whatever goes wrong in there, an exception, a lost CUDA context, a hang, a death,
arrives here as a `Failure` with a status from the closed list, and the next request starts a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from workbench.contract import Workload
from workbench.fingerprint import ROOT
from workbench.record import Failure, Status

START_S = 120.0
"""Importing torch and making a CUDA context takes at most this long, on the slowest machine met."""

OUTPUT_TAIL = 4000
"""Characters kept of what a worker printed, for the record of its failure."""


class Worker:
    """One child process for one variant (or for measuring ceilings).

    `device` is what the child runs on (`cuda`, `cuda:1`, `cpu`), `timeout` the seconds a request may take unless it
    says otherwise. The process starts with the first request, and again after it died.
    """

    def __init__(self, device: str, *, timeout: float = 300.0, environment: Mapping[str, str] | None = None) -> None:
        """See the class."""
        self.device = device
        self.timeout = timeout
        self.hello: dict[str, Any] = {}
        self.fresh = True
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._output: Any = None
        self._retired = False

    def __enter__(self) -> Worker:
        """Use as a context: the process ends with it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.kill()

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(
        self, what: str, *, timeout: float | None = None, meanwhile: Callable[[], None] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send one request and wait for its answer; `meanwhile` is called once while the child works.

        Raises Failure: what the child reported, or TIMED_OUT, or CRASHED.
        """
        if self._process is None:
            self._start()
        return self._exchange(what, timeout or self.timeout, meanwhile, arguments)

    def kill(self, *, wait: bool = True) -> None:
        """End the process and its children now; safe from another thread. Without `wait` don't see them gone."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5 if wait else 0)

    def retire(self) -> None:
        """End the process for good: requests under way and later ones end with Failure(INTERRUPTED).

        Does not wait: giving back a GPU's memory takes a process its time.
        """
        self._retired = True
        self.kill(wait=False)

    def _start(self) -> None:
        if self._retired:
            raise Failure(Status.INTERRUPTED, "the worker was stopped")
        ours, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process that prints into it)
        environment = {**os.environ, **self._environment}
        environment["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))])
        )
        environment["PYTHONUNBUFFERED"] = "1"
        if not self.device.startswith("cuda"):
            environment.setdefault("TRITON_INTERPRET", "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench.worker_process", str(theirs.fileno()), self.device],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self._pipe = ours
        self.hello = self._exchange("hello", START_S, None, {})
        self.fresh = True

    def _exchange(
        self, what: str, timeout: float, meanwhile: Callable[[], None] | None, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        pipe, process = self._pipe, self._process
        if pipe is None or process is None:
            raise Failure(Status.INTERRUPTED, "the worker was stopped")
        try:
            pipe.send_bytes(json.dumps({"what": what, "within": timeout, **arguments}).encode())
            deadline = time.monotonic() + timeout
            if meanwhile is not None and not pipe.poll(0.02):
                meanwhile()
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self._dump(process)
                self.kill()
                raise Failure(Status.TIMED_OUT, f"{what} took more than {timeout:g} s", self._tail())
            answer = json.loads(pipe.recv_bytes())
        except (EOFError, OSError, ValueError) as broken:
            raise self._death(process, what, broken) from None
        if not isinstance(answer, dict) or not {"answer", "failure"} & set(answer):
            raise self._death(process, what, ValueError("no record"))
        failure = answer.get("failure")
        if failure is not None:
            if failure.get("lost"):  # the context is unusable; the next request gets a new process
                self.kill()
            detail = "\n".join(text for text in (failure.get("detail", ""), self._tail()) if text)
            raise Failure(Status(failure["status"]), failure["reason"], detail)
        found: dict[str, Any] = answer["answer"]
        return found

    @staticmethod
    def _dump(process: subprocess.Popen[bytes]) -> None:
        """Have a hung child write where it hangs (`faulthandler` does, on this signal) before it is killed."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.send_signal(signal.SIGABRT)
            process.wait(1)

    def _death(self, process: subprocess.Popen[bytes], what: str, broken: Exception) -> Failure:
        """What became of the child: its exit code or signal in words."""
        if self._process is None:  # killed from another thread
            return Failure(Status.INTERRUPTED, "the worker was stopped")
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is None:
            reason = f"answered with something that is no record during {what} ({broken})"
        elif code < 0:
            name = signal.Signals(-code).name
            hint = "; perhaps the system ran out of memory" if name == "SIGKILL" else ""
            reason = f"its process died of {name} during {what}{hint}"
        else:
            reason = f"its process ended with exit code {code} during {what}"
        return Failure(Status.CRASHED, reason, self._tail())

    def _tail(self) -> str:
        """The end of what the child printed."""
        try:
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - OUTPUT_TAIL))
            return str(self._output.read().decode(errors="replace").strip())
        except (OSError, ValueError, AttributeError):
            return ""


def described(workload: Workload) -> dict[str, Any]:
    """A workload as a request carries it."""
    return {"op": workload.op, "axes": [list(pair) for pair in workload.axes], "preset": workload.preset}


def load(
    worker: Worker,
    variant: str,
    workload: Workload,
    *,
    parameters: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    timeout: float | None = None,
) -> dict[str, Any]:
    """Have a worker load a variant for a workload.

    Answers `parameters` (resolved), `source_hash`, `origin`, `where`. Raises Failure (UNAVAILABLE, REFUSED, …).
    """
    return worker.ask(
        "load",
        timeout=timeout,
        variant=variant,
        workload=described(workload),
        parameters=dict(parameters or {}),
        plugins=list(plugins),
    )


def run_gate(
    variant: str,
    workload: Workload,
    *,
    device: str,
    seeds: Sequence[int],
    regimes: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    timeout: float = 300.0,
    worker: Worker | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run the gate in a worker (one of its own if none is given); the record of `GateResult.to_json`.

    `options` are passed to `workbench.gate.check` as they are (JSON-able). Raises Failure if the worker crashed, hung,
    ran out of memory or the variant could not be loaded; a gate that was failed is a result, not a Failure.
    """
    with contextlib.ExitStack() as stack:
        if worker is None:
            worker = stack.enter_context(Worker(device, timeout=timeout))
        load(worker, variant, workload, parameters=parameters, plugins=plugins, timeout=timeout)
        return worker.ask(
            "gate",
            timeout=timeout,
            seeds=list(seeds),
            regimes=None if regimes is None else list(regimes),
            options=options,
        )
