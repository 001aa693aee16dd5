"""The variants of residual_rmsnorm through the gate, and the Triton kernel through the compiler of both GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from workbench import registry
from workbench.contract import contract
from workbench.gate import check

CONTRACT = contract("residual_rmsnorm")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from variants.residual_rmsnorm.triton_fused import _rows_kernel as kernel

pointers = {name: "*bf16" for name in ("branch", "residual", "weight", "out")}
strides = {name: "i32" for name in ("tokens", "branch_stride", "residual_stride", "out_stride")}
floats = {"scale": "fp32", "eps": "fp32"}
for arch in (90, 120):
    for hidden, rows, warps in ((4096, 1, 8), (384, 4, 4), (16384, 1, 16)):
        sizes = {"HIDDEN": hidden, "ROWS": rows, "BLOCK": triton.next_power_of_2(hidden), "INTERPRETED": False}
        types = {**pointers, **strides, **floats, **{name: "constexpr" for name in sizes}}
        signature = {name: types[name] for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
        assert "cvt.rn.bf16" in built.asm["ptx"], "the sum must be rounded, not kept in float32"
        print(arch, hidden, built.metadata.shared, len(built.asm["cubin"]))
"""


@pytest.mark.parametrize("name", ["eager", "compiled", "triton_fused"])
def test_variant_passes_the_gate(name: str) -> None:
    variant = registry.find("residual_rmsnorm", name)
    # Compiling takes longer than everything else: two sizes and no edges where that is done in C++.
    quick = name == "compiled" and DEVICE.type == "cpu"
    for index, workload in enumerate(CONTRACT.presets["smoke"][1:3] if quick else CONTRACT.presets["smoke"]):
        reason = registry.refusal(variant, workload, DEVICE)
        if reason is not None:
            pytest.skip(reason)
        result = check(CONTRACT, variant, workload, seeds=(0,), device=DEVICE, edges=index == 0 and not quick)
        assert result.failure is None, f"{workload.label}: {result.failure.sentence}"


@pytest.mark.parametrize("name", ["eager", "triton_fused"])
@pytest.mark.skipif(DEVICE.type != "cuda", reason="16384 rows of 4096 take a GPU")
def test_variant_passes_at_the_largest_piece(name: str) -> None:
    variant = registry.find("residual_rmsnorm", name)
    workload = CONTRACT.workload(tokens=16384)
    result = check(CONTRACT, variant, workload, seeds=(0,), device=DEVICE, edges=False)
    assert result.failure is None, result.failure.sentence


def test_kernel_compiles_for_both_gpus() -> None:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6
