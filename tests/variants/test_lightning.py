"""The variants of lightning_decode and lightning_prefill: the gate where they run, their calls where they don't."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from reference.lightning import recurrence
from reference.numerics import MODEL
from workbench.contract import Contract, Workload, contract
from workbench.gate import check
from workbench.gate.judge import judge
from workbench.registry import find

CPU = torch.device("cpu")
DECODE, PREFILL = contract("lightning_decode"), contract("lightning_prefill")


def _run(law: Contract, function: Any, workload: Workload, regime: str, **tunables: Any) -> None:
    """Call a variant's function as it is and judge every output."""
    args = law.make_inputs(workload, 4, regime, CPU)

    answers = [
        law.reference(reference, args, precision) for precision in (reference.numerics.MODEL, reference.numerics.ORACLE)
    ]
    before = {name: args[name].clone() for name in law.outputs}
    function(**args, **tunables)
    for name, rule in law.outputs.items():
        verdict = judge(rule, args[name], before[name], answers[0][name], answers[1][name])
        assert verdict.kind is None, (workload.label, regime, name, verdict)


@pytest.mark.parametrize("op", ["lightning_decode", "lightning_prefill"])
def test_eager_passes_the_gate(op: str) -> None:
    law = contract(op)
    for workload in law.presets["smoke"]:
        result = check(law, find(op, "eager"), workload, seeds=(0,), device=CPU)
        assert result.failure is None, result.failure


@pytest.mark.parametrize("op", ["lightning_decode", "lightning_prefill"])
def test_eager_with_nothing_but_padding_touches_nothing(op: str) -> None:
    law = contract(op)
    args = law.make_inputs(law.presets["smoke"][1], 0, "ordinary", CPU)
    args["slots"].fill_(-1)
    before = {name: args[name].clone() for name in law.outputs}
    find(op, "eager").function(**args)
    for name, value in before.items():
        assert torch.equal(args[name].view(torch.int16), value.view(torch.int16))


@pytest.mark.parametrize("regime", ["ordinary", "tiny", "padded", "strided"])
def test_triton_fused_interpreted(regime: str) -> None:
    pytest.importorskip("triton")
    function = find("lightning_decode", "triton_fused").function
    for batch, heads, block_v in ((3, 2, 128), (1, 3, 64)):
        workload = DECODE.workload(batch=batch, heads=heads, context=9000)
        _run(DECODE, function, workload, regime, block_v=block_v)
        _run(DECODE, function, workload, regime, block_v=128)  # the counters are back at zero


@pytest.mark.parametrize("regime", ["ordinary", "still", "fresh", "ragged", "padded", "strided"])
def test_triton_chunk_interpreted(regime: str) -> None:
    pytest.importorskip("triton")
    function = find("lightning_prefill", "triton_chunk").function
    _run(PREFILL, function, PREFILL.workload(batch=3, tokens=67, heads=2, context=300), regime, block_v=128)


def test_triton_chunk_one_token_and_thin_slices() -> None:
    pytest.importorskip("triton")
    function = find("lightning_prefill", "triton_chunk").function
    _run(PREFILL, function, PREFILL.workload(batch=1, tokens=1, heads=3, context=70), "ordinary", block_v=64)


@pytest.mark.parametrize("regime", ["ordinary", "padded", "strided"])
def test_compiled_arithmetic(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to the compiler, run without it; the compiler itself is raced by the command line."""
    module = importlib.import_module("variants.lightning_decode.compiled")
    for device, least in (("cuda", 1), ("cpu", 2)):
        step = lambda *args, least=least: module._step(module._advance, least, *args)  # noqa: E731
        monkeypatch.setattr(module, "_compiled", lambda _, step=step: step)
        for batch in (1, 3):
            _run(DECODE, module.compiled, DECODE.workload(batch=batch, heads=2, context=500), regime)
        assert device


@pytest.fixture()
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for flash-linear-attention, with the arguments that the variants use and the law's arithmetic."""

    def fused_recurrent_simple_gla(
        q: Tensor, k: Tensor, v: Tensor, g_gamma: Tensor, scale: float, initial_state: Tensor, output_final_state: bool
    ) -> tuple[Tensor, Tensor]:
        assert q.dtype is k.dtype is v.dtype is torch.bfloat16 and q.is_contiguous() and output_final_state
        assert scale == pytest.approx(128**-0.5) and bool((g_gamma < 0).all())
        results = [recurrence(q[b], k[b], v[b], initial_state[b], MODEL) for b in range(q.shape[0])]
        return torch.stack([out for out, _ in results]), torch.stack([state for _, state in results])

    def chunk_simple_gla(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g_gamma: Tensor,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == 1 and initial_state.shape[0] == cu_seqlens.numel() - 1
        assert cu_seqlens.dtype is torch.int64 and torch.equal(cu_seqlens, cu_seqlens_cpu)
        results = []
        for b, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
            part = slice(begin, end)
            first = initial_state[b : b + 1]
            out, state = fused_recurrent_simple_gla(
                q[:, part], k[:, part], v[:, part], g_gamma, scale, first, output_final_state
            )
            results.append((out, state))
        return torch.cat([out for out, _ in results], 1), torch.cat([state for _, state in results])

    module = ModuleType("fla.ops.simple_gla")
    module.fused_recurrent_simple_gla = fused_recurrent_simple_gla  # type: ignore[attr-defined]
    module.chunk_simple_gla = chunk_simple_gla  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", module)
    yield


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("regime", DECODE.regimes)
def test_fla_recurrent_around_a_stand_in(regime: str) -> None:
    function = find("lightning_decode", "fla_recurrent").function
    _run(DECODE, function, DECODE.workload(batch=3, heads=2, context=300), regime)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("regime", PREFILL.regimes)
def test_fla_chunk_around_a_stand_in(regime: str) -> None:
    function = find("lightning_prefill", "fla_chunk").function
    _run(PREFILL, function, PREFILL.workload(batch=4, tokens=20, heads=2, context=300), regime)


TRITON = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from variants.lightning_decode.triton_fused import _decode_kernel
from variants.lightning_prefill.triton_chunk import _chunk_kernel, _gate_kernel, _rotate_kernel

POINTERS = {"state": "*fp32", "frequencies": "*fp32", "decays": "*fp32", "log_decays": "*fp32", "counters": "*i32",
            "positions": "*i32", "slots": "*i32", "cu_seqlens": "*i32", "start": "*i32"}
SCALARS = {"scale": "fp32", "eps": "fp32", "tokens": "i32", "batch": "i32", "state_slot_stride": "i64"}

def build(kernel, architecture, warps, **constants):
    def kind(name):
        stride = "i32" if name.endswith("stride") else "*bf16"
        return "constexpr" if name in constants else POINTERS.get(name) or SCALARS.get(name) or stride
    source = ASTSource(fn=kernel, signature={name: kind(name) for name in kernel.arg_names},
                       constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()})
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    assert built.metadata.shared <= 99 * 1024, (kernel, built.metadata.shared)
    assert ".approx.f32" not in "".join(x for x in built.asm["ptx"].splitlines() if "sin." in x or "cos." in x)

common = {"INTERPRETED": False}
for architecture in (90, 120):
    build(_decode_kernel, architecture, 4, HEADS=6, DIM=128, BLOCK_V=32, ROW=1024, **common)
    build(_rotate_kernel, architecture, 4, HEADS=6, HEADS_PADDED=8, DIM=128, BATCH=8, ROWS=1, **common)
    build(_chunk_kernel, architecture, 8, HEADS=32, DIM=128, CHUNK=64, BLOCK_V=32, **common)
    build(_gate_kernel, architecture, 4, WIDTH=768, ROW=1024, BATCH=8, ROWS=1, **common)
"""


def test_triton_kernels_compile_for_both_architectures(tmp_path: Any) -> None:
    """In a process of its own: here Triton may be interpreting."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed")
@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_tilelang_kernel_lowers(architecture: str) -> None:
    import tilelang
    from tvm.target import Target

    from variants.lightning_decode.tilelang_fused import program

    with Target({"kind": "cuda", "arch": architecture}) as target:
        source = tilelang.engine.lower(program(32, 128, 32, 128), target=target, enable_device_compile=False)
    assert source.kernel_source.count("__launch_bounds__") == 2 and "cosf" in source.kernel_source
