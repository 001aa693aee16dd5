"""Emptying the GPU's L2 before a timed region, and keeping its stream busy while the region is enqueued."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_PERSISTING_L2_LIMIT = 0x06  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the driver's CUlimit
_CYCLES_PER_S = 2.0e9  # of `torch.cuda._sleep`; only an order of magnitude is needed


class Flush:
    """Buffers of twice the L2 to write and to read; `dirty` is the share of the L2 left unwritten at the end.

    A flush by writing leaves the L2 full of lines that the timed region must write back; one by reading lets the
    timed region leave its own writes unpaid. Leaving as much unwritten as the op writes itself is the steady state.
    """

    def __init__(self, device: torch.device, dirty: float) -> None:
        """See the class."""
        size = self.l2_bytes(device)
        self._written = torch.empty(2 * size, dtype=torch.uint8, device=device)
        self._read = torch.zeros(2 * size // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)
        self._dirty = int(size * dirty)
        self._driver = _driver()
        if self._driver is not None:
            self._driver.cuCtxSetLimit(_PERSISTING_L2_LIMIT, ctypes.c_size_t(0))

    @staticmethod
    def l2_bytes(device: torch.device) -> int:
        """Size of the device's L2; 64 MiB where PyTorch doesn't tell."""
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 * 2**20

    def occupy(self, seconds: float) -> None:
        """Keep the stream busy for at least 0.2 ms, at most 50 ms, so that what follows is enqueued behind it."""
        if self._driver is not None:
            self._driver.cuCtxResetPersistingL2Cache()
        torch.cuda._sleep(int(min(max(seconds, 2e-4), 0.05) * _CYCLES_PER_S))

    def clear(self) -> None:
        """Evict everything, then leave the op's own share of unwritten lines."""
        self._written.zero_()
        torch.sum(self._read, dim=0, out=self._sum)
        if self._dirty:
            self._written[: self._dirty].zero_()


def _driver() -> Any:
    """NVIDIA's driver library, None where it can't be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
