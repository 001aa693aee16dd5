"""What must be equal for two figures to be comparable, and what else is worth knowing when they differ.

`machine` decides: GPU, driver, compilers, library versions, processor and the protocol of timing; its hash is
the key under which measurements are compared. `code` says which sources made a figure: commits may differ, that is
what a comparison is for.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.timing.protocol import VERSION

PACKAGES = ("torch", "triton", "tilelang", "flashinfer-python", "flash-linear-attention", "numpy")
"""Distributions whose version can change what a variant's kernel compiles to."""

ROOT = Path(__file__).resolve().parent.parent


def machine(device: str) -> dict[str, Any]:
    """Facts of this machine as seen from `device` (`cuda`, `cuda:1`, `cpu`), JSON-able; None for what can't be found.

    On a GPU this initialises CUDA, so a parent that wants no context of its own asks a worker.
    """
    import torch

    facts: dict[str, Any] = {
        "protocol": VERSION,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": cores(),
        "packages": {name: version(name) for name in PACKAGES},
        "device": torch.device(device).type,
        "gpu": None,
        "gpu_memory_gib": None,
        "multiprocessors": None,
        "arch": None,
        "driver": None,
        "cuda": None,
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(torch.device(device))
        facts |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30),
            "multiprocessors": properties.multi_processor_count,
            "arch": f"sm_{properties.major}{properties.minor}",
            "driver": driver(),
            "cuda": torch.version.cuda,
        }
    return facts


def key(facts: Mapping[str, Any]) -> str:
    """First 12 hex digits of the hash of a machine's facts: measurements of one key may be compared."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def code(op: str, plugins: Iterable[str] = ()) -> dict[str, Any]:
    """Which sources are at work: commit (with `-dirty` if files differ from it), and their digest."""
    return {"commit": commit(), "sources": sources(op, plugins)}


@functools.cache
def commit() -> str | None:
    """`git describe --always --dirty` of the checkout this package lies in; None outside one or without a commit."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--tags"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def sources(op: str, plugins: Iterable[str] = ()) -> str:
    """First 16 hex digits of a hash of every source that decides a race of `op`.

    The law, the bench (but for its commands and mutants), the op's variants, what variants share, and the plug-ins: a
    race that was interrupted may only go on with the same.
    """
    digest = hashlib.sha256()
    for path in sorted(_files(op)) + [Path(plugin) for plugin in plugins]:
        digest.update(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:16]


def _files(op: str) -> Iterable[Path]:
    yield from (ROOT / "reference").rglob("*.py")
    for folder in ("", "ops", "gate", "timing"):
        yield from (ROOT / "workbench" / folder).glob("*.py")
    variants = ROOT / "variants"
    yield from variants.glob("*.py")
    yield from (
        path
        for folder in variants.glob("*")
        if folder.name == op or folder.name.startswith("_")
        for path in folder.rglob("*.py")
    )


def version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def last_level_cache() -> int:
    """Bytes of the processor's largest cache; 32 MiB if the system doesn't say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=32 * 2**20)


def driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    path = Path("/proc/driver/nvidia/version")
    with nvml() as library:
        if library is not None:
            found = library.nvmlSystemGetDriverVersion()
            return found.decode() if isinstance(found, bytes) else str(found)
    try:
        text = path.read_text()
    except OSError:
        return None
    words = text.split()
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


class nvml:  # noqa: N801  (used as a context, like `open`)
    """NVIDIA's management library for the time of a `with`; None without a driver or the package nvidia-ml-py."""

    def __enter__(self) -> Any:
        """Initialise; counted by the library, so nesting is fine."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, no driver, no permission: facts of the GPU are then not measured
            self._library = None
        else:
            self._library = pynvml
        return self._library

    def __exit__(self, *_: object) -> None:
        """Shut down what was initialised."""
        if self._library is not None:
            self._library.nvmlShutdown()


class Conditions:
    """Clocks, power, temperature and throttle reasons of one device, read as often as wanted.

    `uuid` is the GPU's as PyTorch or `nvidia-smi -L` print it; None stands for the CPU.
    """

    def __init__(self, uuid: str | None) -> None:
        """See the class."""
        self._library: Any = None
        self._handle: Any = None
        if uuid is None:
            return
        library = nvml().__enter__()
        if library is None:
            return
        try:
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            self._handle = library.nvmlDeviceGetHandleByUUID(name)
            self._library = library
        except library.NVMLError:
            self._handle = None

    def read(self) -> dict[str, Any]:
        """What can be read now, units in the names; what can't be is None. Without a GPU: the system's load."""
        if self._library is None:
            return {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
        library, handle = self._library, self._handle

        def ask(function: str, *arguments: Any) -> Any:
            try:
                return getattr(library, function)(handle, *arguments)
            except (library.NVMLError, AttributeError):
                return None

        power = ask("nvmlDeviceGetPowerUsage")
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            "sm_mhz": ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
            "memory_mhz": ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
            "power_w": None if power is None else round(power / 1000),
            "temperature_c": ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            "throttled": None if throttle is None else throttle_reasons(throttle),
        }


THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's throttle reasons that slow a kernel down (idle and user-set clocks are left out)."""


def throttle_reasons(bits: int) -> list[str]:
    """The throttle reasons in `bits` in words."""
    return [name for bit, name in THROTTLE.items() if bits & bit]
