"""The pieces of `sampling`'s variants that a gate's few rows may not reach."""

from __future__ import annotations

import pytest
import torch

from reference import sampling as law
from reference.numerics import ORACLE
from variants.sampling import eager
from workbench import registry

registry.interpret_without_gpu()
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
gumbel = pytest.importorskip("variants.sampling.triton_gumbel").gumbel


@triton.jit
def noise_kernel(words, out, BLOCK: tl.constexpr):  # type: ignore[name-defined]
    """Gumbel noise of each word."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, gumbel(tl.load(words + at).to(tl.uint32)))


def test_eager_noise_is_the_law_s() -> None:
    seed, step = torch.tensor([-9, 1 << 62, 5]), torch.tensor([0, (1 << 40) + 3, -2])
    assert eager._noise(seed, step, 777).equal(law.gumbel(seed, step, 777).float())


def test_gumbel_is_accurate_at_both_ends() -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled for the GPU; the gate checks it there")
    powers = torch.tensor([1 << n for n in range(32)])
    edges = torch.tensor([0, (1 << 32) - 1, 0x7FFFFFFF, 0x80000001, 0xEFFFFFFF, 0xF0000000, 0xF0000001])
    spread = torch.arange(201) * 21368719
    words = torch.cat((powers, (1 << 32) - powers, edges, spread))
    words = torch.cat((words, words.new_zeros(512 - len(words))))
    out = torch.empty(512)
    noise_kernel[(1,)](words, out, BLOCK=512)
    exact = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
    torch.testing.assert_close(out.double(), exact, rtol=4e-7, atol=4e-7)


@pytest.mark.parametrize("name", ["eager", "triton_gumbel"])
def test_filters_on_ties(name: str) -> None:
    """Rows of few distinct logits, so that every threshold falls among equals."""
    found = registry.find("sampling", name)
    rows, vocabulary = 8, 70
    logits = (torch.arange(rows * vocabulary).reshape(rows, -1) * 7919 % 3).to(torch.bfloat16) - 1.0
    args = {
        "logits": logits,
        "temperature": torch.full((rows,), 0.7),
        "top_k": torch.tensor([0, 0, 1, 30, 25, 0, 70, 71], dtype=torch.int32),
        "top_p": torch.tensor([0.2, 0.9, 1.0, 1.0, 0.5, 1e-9, 0.99, 0.6]),
        "seed": torch.arange(rows) * 7,
        "step": torch.arange(rows),
    }
    if name == "triton_gumbel" and torch.cuda.is_available():
        pytest.skip("the kernel is compiled for the GPU; the gate checks it there")
    tokens = torch.full((rows,), -7, dtype=torch.int32)
    found.function(**args, tokens=tokens)
    assert tokens.equal(law.sample(**args, precision=ORACLE))
