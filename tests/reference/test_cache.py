"""A sequence's caches: rows that grow, and compressed keys that do not depend on when they are built."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from reference.cache import Growing, KeyCache, LightningCache, Sequence
from reference.compression import compress
from reference.config import preset
from reference.numerics import MODEL, ORACLE, Precision

CONFIG = dataclasses.replace(preset("sala-tiny"), head_dim=8)


def test_rows_keep_their_bits_as_the_storage_grows() -> None:
    held, wanted = Growing((3,), torch.float32, "cpu"), torch.randn(1000, 3)
    for part in wanted.split([1, 63, 1, 500, 0, 435]):
        held.append(part)
    assert len(held) == 1000
    assert torch.equal(held.rows, wanted)


@pytest.mark.parametrize("precision", [MODEL, ORACLE])
def test_compressed_keys_built_at_every_step_are_those_of_the_whole(precision: Precision) -> None:
    keys = torch.randn(520, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys = keys if precision is MODEL else keys.double()
    cache = KeyCache(CONFIG, precision, "cpu")
    for count, key in enumerate(keys.split(1), 1):
        cache.append(key, key)
        fine, coarse = cache.compressed()
        assert cache.windows == (max(0, count // 16 - 1), max(0, count // 64 - 1)) == (len(fine), len(coarse))
    assert torch.equal(fine, compress(keys, 32, 16, precision))
    assert torch.equal(coarse, compress(keys, 128, 64, precision))
    late = KeyCache(CONFIG, precision, "cpu")
    late.append(keys, keys)
    assert all(torch.equal(a, b) for a, b in zip(late.compressed(), (fine, coarse)))


def test_new_sequence_remembers_nothing() -> None:
    sequence = Sequence(CONFIG, 5, MODEL)
    assert sequence.length == 0
    assert len(sequence.layers) == CONFIG.num_hidden_layers
    for cache in sequence.layers:
        if isinstance(cache, LightningCache):
            assert cache.state.dtype == torch.float32
            assert not cache.state.any()
        else:
            assert len(cache.keys) == len(cache.values) == 0
            assert cache.windows == (0, 0)
