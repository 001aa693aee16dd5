"""What this machine has for the workbench, what it lacks, and the command that would bring it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench import fingerprint
from workbench.registry import DISTRIBUTIONS, entries, install_command, refusal


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked for.

    `found` says what there is (None: nothing), `use` what it is for, `remedy` the command that would bring it
    where it is missing and can be brought.
    """

    group: str
    name: str
    found: str | None
    use: str = ""
    remedy: str | None = None


PACKAGES = (
    ("torch", "the law, the gate, every eager variant", True),
    ("triton", "Triton variants; interpreted without a GPU", True),
    ("tilelang", "TileLang variants", False),
    ("flashinfer", "FlashInfer variants", False),
    ("fla", "flash-linear-attention's variants", False),
    ("pynvml", "clocks, power and throttle reasons of a GPU", False),
    ("numpy", "Triton's interpreter", True),
    ("scipy", "intervals of the timing", True),
    ("sqlalchemy", "the store", True),
    ("safetensors", "checkpoints and golden files", True),
    ("jaxtyping", "the contracts' signatures", True),
    ("pytest_benchmark", "make benchmark", True),
)
"""Packages as imported, what they are for, and whether a machine without a GPU has a use for them."""


def findings() -> list[Finding]:
    """Machine, GPU, compilers and packages. Starts no CUDA context of its own but what torch's own check needs."""
    gpus = _gpus()
    return [*_machine(), *gpus, *_compilers(), *_packages(has_gpu=any(found.found for found in gpus))]


def refused(device: Any, ops: Sequence[str]) -> list[dict[str, str]]:
    """Variants that can't run on the torch device `device` whatever the workload: op, variant, reason."""
    rows = []
    for op in ops:
        for entry in entries(op):
            reason = entry.reason if entry.variant is None else refusal(entry.variant, None, device)
            if reason is not None:
                rows.append({"op": op, "variant": entry.name, "reason": reason})
    return rows


def _machine() -> list[Finding]:
    found = [
        Finding("machine", "system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("machine", "processor", f"{fingerprint.cpu_model()}, {fingerprint.cores()} cores"),
        Finding("machine", "memory", _memory()),
        Finding("machine", "python", f"{platform.python_version()} ({sys.executable})"),
        Finding("machine", "workbench", fingerprint.version("sala-workbench"), "", "make install"),
        Finding("machine", "commit", fingerprint.commit(), "kept with each measurement"),
    ]
    return found


def _memory() -> str | None:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (AttributeError, OSError, ValueError):  # not on this system
        return None


def _gpus() -> list[Finding]:
    """One finding a GPU as the driver sees it, and what torch makes of them."""
    import torch

    query = ["--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits"]
    lines = (_output(["nvidia-smi", *query]) or "").splitlines()
    found = []
    for number, line in enumerate(lines):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            name, mebibytes, capability, driver = fields
            gibibytes = f"{int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else mebibytes
            text = f"{name}, {gibibytes}, sm_{capability.replace('.', '')}, driver {driver}"
            found.append(Finding("GPU", f"gpu {number}", text))
    if not found:
        found.append(Finding("GPU", "gpu", None, "without one variants run on the CPU, Triton's interpreted"))
    if torch.cuda.is_available():
        arches = " ".join(torch.cuda.get_arch_list())
        found.append(Finding("GPU", "torch's CUDA", f"{torch.version.cuda}, built for {arches}"))
    elif any(finding.found for finding in found):
        version = torch.version.cuda
        why = f"torch is built for CUDA {version} but can't use the GPU" if version else "torch is built without CUDA"
        found.append(Finding("GPU", "torch's CUDA", None, why, "rm -rf .venv && make install"))
    return found


def _compilers() -> list[Finding]:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    nvcc = shutil.which("nvcc") or _existing(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
    return [
        Finding(
            "compilers",
            "C++",
            _first_line([compiler, "--version"]) if compiler else None,
            "torch.compile on the CPU, Triton's launchers",
            "apt-get install g++",
        ),
        Finding(
            "compilers",
            "Python.h",
            str(header) if header.exists() else None,
            "torch.compile on the CPU, Triton's launchers",
            f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev",
        ),
        Finding(
            "compilers",
            "nvcc",
            _release([nvcc, "--version"]) if nvcc else None,
            "the CUDA toolkit: TileLang and FlashInfer build with it",
            "apt-get install nvidia-cuda-toolkit",
        ),
        Finding("compilers", "ptxas", _triton_ptxas(), "Triton on a GPU; comes with it", install_command("triton")),
    ]


def _packages(*, has_gpu: bool) -> list[Finding]:
    found = []
    for name, use, everywhere in PACKAGES:
        there = importlib.util.find_spec(name) is not None
        version = fingerprint.version(DISTRIBUTIONS.get(name, name.replace("_", "-"))) if there else None
        text = (version or "yes") if there else None
        useful = everywhere or has_gpu
        remark = use if useful else f"{use} (need a GPU)"
        found.append(Finding("packages", name, text, remark, install_command(name) if useful else None))
    return found


def _triton_ptxas() -> str | None:
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if binary.exists():
            return _release([str(binary), "--version"])
    return None


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _output(command: Sequence[str]) -> str | None:
    """What a program prints; None if there is none of that name, it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(command: Sequence[str]) -> str | None:
    return next(iter((_output(command) or "").splitlines()), None)


def _release(command: Sequence[str]) -> str | None:
    """The line with the release in what NVIDIA's tools print."""
    lines = (_output(command) or "").splitlines()
    return next((line.split("release ")[1].strip() for line in lines if "release " in line), None)
