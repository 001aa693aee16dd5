"""What the model remembers of one sequence: keys, values and compressed keys, or a lightning state, a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .compression import compress
from .config import K1_SIZE, K1_STRIDE, K2_SIZE, K2_STRIDE, SPARSE, SalaConfig
from .numerics import MODEL, Precision


class Growing:
    """Rows appended to a tensor [rows, ...] whose storage doubles as it fills."""

    def __init__(self, row: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        """An empty tensor of rows shaped `row`."""
        self._storage = torch.empty(64, *row, dtype=dtype, device=device)
        self._used = 0

    def __len__(self) -> int:
        """Rows held."""
        return self._used

    @property
    def rows(self) -> Tensor:
        """All rows so far, a view [len(self), ...]."""
        return self._storage[: self._used]

    def append(self, rows: Tensor) -> None:
        """Add `rows` [n, ...] at the end."""
        used = self._used + rows.shape[0]
        if used > self._storage.shape[0]:
            larger = self._storage.new_empty(max(used, 2 * self._storage.shape[0]), *self._storage.shape[1:])
            larger[: self._used] = self.rows
            self._storage = larger
        self._storage[self._used : used] = rows
        self._used = used


class KeyCache:
    """A sparse layer's keys and values [n, KV, D], and the compressed keys of the windows completed so far.

    bfloat16, or float64 for the oracle. The compressed keys are built when they are first needed and then kept
    up, so a sequence that crosses dense_len in decode builds all of them at that step.
    """

    def __init__(self, config: SalaConfig, precision: Precision, device: torch.device | str) -> None:
        """An empty cache."""
        row = (config.num_key_value_heads, config.head_dim)
        dtype = torch.bfloat16 if precision is MODEL else torch.float64
        self._precision = precision
        self._keys, self._values, self._k1, self._k2 = (Growing(row, dtype, device) for _ in range(4))

    @property
    def keys(self) -> Tensor:
        """Keys [n, KV, D]."""
        return self._keys.rows

    @property
    def values(self) -> Tensor:
        """Values [n, KV, D]."""
        return self._values.rows

    @property
    def windows(self) -> tuple[int, int]:
        """How many fine and coarse compressed keys have been built."""
        return len(self._k1), len(self._k2)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the keys and values [t, KV, D] of the next t tokens."""
        self._keys.append(keys)
        self._values.append(values)

    def compressed(self) -> tuple[Tensor, Tensor]:
        """Fine and coarse compressed keys, [n1, KV, D] and [n2, KV, D]; windows completed since are built first."""
        for built, size, stride in ((self._k1, K1_SIZE, K1_STRIDE), (self._k2, K2_SIZE, K2_STRIDE)):
            built.append(compress(self.keys[len(built) * stride :], size, stride, self._precision))
        return self._k1.rows, self._k2.rows


class LightningCache:
    """A lightning layer's state [H, D, D], key index first: float32, or float64 for the oracle; zero at first."""

    def __init__(self, config: SalaConfig, precision: Precision, device: torch.device | str) -> None:
        """A sequence without tokens."""
        shape = (config.lightning_heads, config.head_dim, config.head_dim)
        self.state = torch.zeros(shape, dtype=torch.float32 if precision is MODEL else torch.float64, device=device)


class Sequence:
    """One sequence under way: its caches, and how many of its tokens they hold (`length`).

    `prompt_length` is the whole prompt's, known when the prompt is admitted: it decides between dense and sparse
    for every piece of the prompt.
    """

    def __init__(
        self, config: SalaConfig, prompt_length: int, precision: Precision, device: torch.device | str = "cpu"
    ) -> None:
        """A sequence none of whose tokens has been fed."""
        if prompt_length < 1:
            raise ValueError(f"prompt_length {prompt_length}: a prompt has at least one token")
        self.prompt_length = prompt_length
        self.length = 0
        self.layers: list[KeyCache | LightningCache] = [
            (KeyCache if mixer == SPARSE else LightningCache)(config, precision, device) for mixer in config.mixer_types
        ]
