"""Measuring the ceilings of this machine, in a worker: the best of several ways and sizes, a few seconds in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

from workbench.fingerprint import cores, last_level_cache


def measure(device: torch.device, seconds: float) -> dict[str, Any]:
    """The fields of `limits.Ceilings` as JSON-able data, within about `seconds` once a context exists."""
    return _measure_gpu(device, seconds) if device.type == "cuda" else _measure_cpu(seconds)


def best(run: Callable[[], Any], clock: Callable[[Callable[[], Any]], float], seconds: float) -> float:
    """The shortest of the times `clock` takes of `run`, repeated for `seconds` and at least five times."""
    clock(run)
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 5 or perf_counter() < end:
        times.append(clock(run))
    return min(times)


def _host_clock(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _measure_cpu(seconds: float) -> dict[str, Any]:
    """Bandwidth from half a cache a core to eight times the largest cache, matrix products of middling size."""
    sizes = [2**20 * cores(), last_level_cache() // 4, 4 * last_level_cache()]
    share = seconds / (4 * len(sizes) + 4)
    read, copy = 0.0, 0.0
    for size in sizes:
        source = torch.ones(size // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        for way in (source.sum, source.amax, partial(torch.dot, source, source)):
            read = max(read, size / best(way, _host_clock, share))
        copy = max(copy, 2 * size / best(partial(target.copy_, source), _host_clock, share))
    fastest = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(1024, 1024, dtype=dtype)
        product = partial(torch.mm, a, a, out=torch.empty_like(a))
        fastest = max(fastest, 2 * 1024**3 / best(product, _host_clock, 2 * share))
    return {
        "device": "cpu",
        "read_bytes_per_s": max(read, copy / 2),
        "copy_bytes_per_s": copy,
        "flops_per_s": {name: fastest for name in ("bf16", "fp8", "tf32", "fp32")},
    }


def _measure_gpu(device: torch.device, seconds: float) -> dict[str, Any]:
    clock = _event_clock(device)
    free, _ = torch.cuda.mem_get_info(device)
    sizes = [size for size in (2**28, 2**30, 2**32) if 4 * size <= free] or [2**26]
    share = seconds / (8 * len(sizes) + 8)
    read, copy = 0.0, 0.0
    for size in sizes:
        source = torch.ones(size // 4, dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        for way in _ways_to_read(source):
            read = max(read, size / best(way, clock, share))
        for way in _ways_to_copy(source, target):
            copy = max(copy, 2 * size / best(way, clock, share))
        del source, target
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(device),
        "read_bytes_per_s": max(read, copy / 2),
        "copy_bytes_per_s": copy,
        "flops_per_s": {name: _matrix_rate(name, device, clock, 2 * share) for name in ("bf16", "fp8", "tf32", "fp32")},
        **_launches(device, clock),
    }


def _event_clock(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    def clock(run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # what follows is enqueued while this runs
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3

    return clock


def _ways_to_read(source: torch.Tensor) -> Iterator[Callable[[], Any]]:
    total = torch.zeros((), dtype=torch.float32, device=source.device)
    yield lambda: torch.sum(source.view(torch.float32), dim=0, out=total)
    try:
        from workbench.timing.bandwidth import reader
    except ImportError:  # no Triton here
        return
    for block, steps, warps in ((4096, 8, 4), (8192, 16, 8), (2048, 32, 4)):
        yield reader(source, block, steps, warps)


def _ways_to_copy(source: torch.Tensor, target: torch.Tensor) -> Iterator[Callable[[], Any]]:
    yield lambda: target.copy_(source)
    yield lambda: torch.add(source, 1, out=target)
    try:
        from workbench.timing.bandwidth import copier
    except ImportError:
        return
    for block, warps in ((4096, 4), (8192, 8), (2048, 4)):
        yield copier(source, target, block, warps)


def _matrix_rate(
    kind: str, device: torch.device, clock: Callable[[Callable[[], Any]], float], seconds: float
) -> float | None:
    """FLOP/s of a square product of `kind` operands, random ones (zeros run faster); None if it can't be run here."""
    size = 8192 if kind in ("bf16", "fp8") else 4096
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        a = torch.randn(size, size, device=device)
        if kind == "fp8":
            one = torch.ones((), device=device)
            left, right = a.to(torch.float8_e4m3fn), a.to(torch.float8_e4m3fn).t()

            def run() -> Any:
                # without fast accumulation Hopper runs at half its rate, and a kernel may choose it
                return torch._scaled_mm(
                    left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                )
        else:
            operand = a.to(torch.bfloat16) if kind == "bf16" else a
            out = torch.empty_like(operand)

            def run() -> Any:
                return torch.mm(operand, operand, out=out)

        return 2 * size**3 / best(run, clock, seconds)
    except (RuntimeError, AttributeError, TypeError):  # not on this architecture or in this release
        return None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _launches(device: torch.device, clock: Callable[[Callable[[], Any]], float], count: int = 200) -> dict[str, float]:
    """Host time of a launch, and time of a nearly empty kernel in a graph, both µs."""
    x = torch.zeros(32, device=device)

    def launch() -> None:
        for _ in range(count):
            x.add_(1)

    launch()
    torch.cuda.synchronize(device)

    def host_clock(run: Callable[[], Any]) -> float:
        time = _host_clock(run)
        torch.cuda.synchronize(device)
        return time

    host = best(launch, host_clock, 0.05)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return {"launch_us": host / count * 1e6, "graph_node_us": best(graph.replay, clock, 0.05) / count * 1e6}
