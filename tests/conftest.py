"""What every test gets: one thread, Triton interpreted where there is no GPU, a store of its own."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: xdist already fills the cores

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

torch.set_num_threads(1)

TOY_OP = '''"""doubling: a contract for tests."""

from __future__ import annotations

from jaxtyping import Float32
from torch import Tensor

import torch
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads


def signature(x: Float32[Tensor, "n"], weight: Float32[Tensor, "n"], out: Float32[Tensor, "n"], factor: int) -> None:
    """Write `x · weight · factor` to `out`."""


def make_inputs(workload, seed, regime, device):
    n = workload["n"]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator).to(device)
    return {"x": x, "weight": torch.full((n,), 3.0, device=device), "out": torch.empty(n, device=device), "factor": 2}


def reference(law, args, precision):
    return {"out": Expected(args["x"] * args["weight"] * args["factor"])}


AXES = {
    "n": Axis(64, "elements", high=1 << 20),
    "form": Axis("plain", "how it is stored", choices=("plain", "packed")),
}

CONTRACT = Contract(
    name="doubling",
    summary="doubles",
    signature=signature,
    axes=AXES,
    outputs={"out": Output(Tolerance.BITWISE)},
    make_inputs=make_inputs,
    reference=reference,
    cost=lambda workload: Cost(2.0 * workload["n"], 8 * workload["n"], 4 * workload["n"]),
    presets={
        "smoke": workloads("doubling", AXES, "smoke", {"n": 3}, {"n": 63}),
        "decode": workloads("doubling", AXES, "decode", {}),
    },
    weights=("weight",),
)
'''

TOY_VARIANT = '''"""A variant for tests."""

from workbench.variant import variant


@variant({declaration})
def {name}(x, weight, out, factor{keywords}):
    """Say {name}."""
    out.copy_(x * weight * factor)
'''


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a test go to a database of its own."""
    monkeypatch.setenv("WORKBENCH_STORE", str(tmp_path / "store.db"))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """An op `doubling` with a folder of variants; `toy(name, …)` writes one and returns its path.

    `text` replaces the whole file, `file` its name, `declaration` and `keywords` fill TOY_VARIANT.
    """
    import sys

    import variants
    import workbench.ops as ops

    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "doubling.py").write_text(TOY_OP)
    folder = tmp_path / "variants" / "doubling"
    folder.mkdir(parents=True)
    ops.__path__.append(str(tmp_path / "ops"))
    variants.__path__.append(str(tmp_path / "variants"))

    def write(
        name: str, *, declaration: str = "", keywords: str = "", text: str | None = None, file: str | None = None
    ) -> Path:
        path = folder / (file or f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        filled = TOY_VARIANT.format(name=name, declaration=declaration, keywords=keywords)
        path.write_text(filled if text is None else text)
        return path

    yield write
    ops.__path__.remove(str(tmp_path / "ops"))
    variants.__path__.remove(str(tmp_path / "variants"))
    for name in [name for name in sys.modules if "doubling" in name or name.startswith("workbench_plugin_")]:
        del sys.modules[name]
    for package in (ops, variants):
        package.__dict__.pop("doubling", None)
