"""The least time an op can take here: its cost at the measured ceilings of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from workbench.contract import Cost


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The best this machine did, of several ways and sizes; None where it could not be measured.

    `read_bytes_per_s` counts bytes read, `copy_bytes_per_s` bytes read and written. `flops_per_s` by kind of matrix
    product (`bf16`, `fp8`, `tf32`, `fp32`). `launch_us` is the host's time of one launch, `graph_node_us` what a nearly
    empty kernel takes inside a graph. On a CPU the rates are those of its caches where these are faster, and
    of the fastest type, since a variant may convert.
    """

    device: str
    read_bytes_per_s: float | None
    copy_bytes_per_s: float | None
    flops_per_s: Mapping[str, float | None]
    launch_us: float | None = None
    graph_node_us: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ceilings:
        """From what the worker measured or the store kept; unknown fields are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    @property
    def label(self) -> str:
        """One line for people."""
        parts = []
        if self.read_bytes_per_s and self.copy_bytes_per_s:
            parts += [f"read {self.read_bytes_per_s / 1e9:,.0f} GB/s", f"copy {self.copy_bytes_per_s / 1e9:,.0f} GB/s"]
        parts += [f"{name} {rate / 1e12:,.3g} TFLOP/s" for name, rate in self.flops_per_s.items() if rate]
        if self.graph_node_us is not None:
            parts.append(f"empty kernel in a graph {self.graph_node_us:.2f} µs")
        return ", ".join(parts)


def limit_us(cost: Cost, ceilings: Ceilings) -> float | None:
    """The larger of traffic over bandwidth and FLOPs over rate, µs; None if neither ceiling is known.

    As many bytes as are both read and written go at the copy rate, what is only read at the read rate, what
    is only written at the copy rate too.
    """
    times = []
    read, copy = ceilings.read_bytes_per_s, ceilings.copy_bytes_per_s
    if read and copy:
        both = min(cost.bytes_read, cost.bytes_written)
        only_read, only_written = cost.bytes_read - both, cost.bytes_written - both
        times.append((2 * both + only_written) / copy + only_read / read)
    rate = ceilings.flops_per_s.get(cost.rate)
    if rate:
        times.append(cost.flops / rate)
    return max(times) * 1e6 if times else None
