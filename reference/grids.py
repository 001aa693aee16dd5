"""Grids of the low-bit formats: which values a weight or an activation may take, and how it gets there.

Arithmetic is float32 with divisions and casts rounded half to even; a scale is rounded to the dtype in which
it is stored before codes are chosen against it. Words and nibbles (where a code lies in memory) are
`layouts.py`'s business. Sources: compressed-tensors 0.19 for integers and fp8 rows, DeepSeek's block format for
fp8 blocks, NVIDIA modelopt 0.47 for NVFP4; each agrees bit for bit where it computes in float32.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest value of float8_e4m3fn (no infinity, no larger finite value)."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in the block format, and inputs that share one in its activations."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 … 7 of a 4-bit float; bit 3 is the sign."""
NVFP4_GROUP = 16
"""Inputs that share an e4m3 scale in NVFP4."""
AMAX_FLOOR = 1e-10
"""Smallest maximum that an activation scale is made of, so that a row of zeros has a finite scale."""


@dataclasses.dataclass(frozen=True)
class IntegerCodes:
    """Group-quantised integers: value = (codes − zeros)·scale.

    `codes` uint8 [N, K] in 0 … 2^bits−1; `scale` [N, K/G], any float dtype; `zeros` uint8 [N, K/G], or None
    for the symmetric grid, whose zero is 2^(bits−1).
    """

    bits: int
    codes: Tensor
    scale: Tensor
    zeros: Tensor | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]


def _groups(w: Tensor, group: int) -> Tensor:
    """View [N, K] as float32 [N, K/group, group]; ValueError where the group does not divide K."""
    if w.dim() != 2:
        raise ValueError(f"a weight has two dimensions [N, K], not {list(w.shape)}")
    if w.shape[1] == 0 or w.shape[1] % group:
        raise ValueError(f"K={w.shape[1]} is not a multiple of the group of {group}")
    return w.float().unflatten(1, (-1, group))


def quantise_integer(
    w: Tensor, bits: int, group: int, *, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> IntegerCodes:
    """Quantise [N, K] to `bits` (4 or 8) with a scale for every `group` inputs, as compressed-tensors does.

    Symmetric: scale = max|w|/((2^bits−1)/2), so a positive maximum lands half a step outside and is clamped.
    Asymmetric: scale = (max − min)/(2^bits−1) with zero inside the range; the zero point comes from the
    unrounded scale. A group of zeros takes the stored dtype's epsilon as its scale.
    """
    groups = _groups(w, group)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        exact = torch.maximum(-least, most) / ((2**bits - 1) / 2)
        zero = torch.zeros_like(exact)
    else:
        exact = (most - least) / (2**bits - 1)
        safe = exact.masked_fill(exact == 0, 1.0)
        zero = (low - least / safe).clamp(low, high).round()
    scale = exact.to(scale_dtype)
    scale = scale.masked_fill(scale == 0, torch.finfo(scale_dtype).eps)
    codes = (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).clamp(low, high).round() - low
    zeros = None if symmetric else (zero - low).to(torch.uint8)
    return IntegerCodes(bits, codes.to(torch.uint8).flatten(1), scale, zeros)


def dequantise_integer(codes: IntegerCodes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values [N, K] of integer codes: the product with the stored scale in float64, rounded once to `dtype`.

    The subtraction is done in integers, so that a zero is +0. With a bfloat16 scale the product is exact
    in float32.
    """
    zeros = 2 ** (codes.bits - 1) if codes.zeros is None else codes.zeros.to(torch.int16).unsqueeze(-1)
    whole = codes.codes.to(torch.int16).unflatten(1, (codes.scale.shape[1], -1)) - zeros
    return _once(whole.double() * codes.scale.double().unsqueeze(-1), dtype).flatten(1)


def _once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float64 product to float32 and, if asked, on to `dtype`, as a float32 kernel would; or keep it."""
    return exact if dtype is torch.float64 else exact.float().to(dtype)


def to_fp8(x: Tensor) -> Tensor:
    """Cast to float8_e4m3fn, half to even, clamped first (not every torch saturates)."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantise_fp8_rows(w: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Quantise [N, K] to e4m3fn with a scale a row: (codes [N, K], scale [N, 1]); value = code·scale.

    scale = max|w|/448, rounded to `scale_dtype`; a row of zeros takes that dtype's epsilon.
    """
    scale = (w.float().abs().amax(1, keepdim=True) / FP8_MAX).to(scale_dtype)
    scale = scale.masked_fill(scale == 0, torch.finfo(scale_dtype).eps)
    return to_fp8(w.float() / scale.float()), scale


def quantise_fp8_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [N, K] to e4m3fn with a float32 scale for every 128×128 block (the last rows may be fewer).

    Returns codes [N, K] and scale [⌈N/128⌉, K/128]; value = code·scale. As the native writer computes it: f = 448/max,
    code = cast(w·f), scale = 1/f; a block of zeros has scale 1.
    """
    rows, columns = w.shape
    if columns % FP8_BLOCK:
        raise ValueError(f"K={columns} is not a multiple of the block of {FP8_BLOCK}")
    padded = torch.nn.functional.pad(w.float(), (0, 0, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    most = blocks.abs().amax((1, 3))
    factor = torch.where(most == 0, torch.ones_like(most), FP8_MAX / most)
    codes = to_fp8(blocks * factor[:, None, :, None]).flatten(2).flatten(0, 1)
    return codes[:rows].contiguous(), 1.0 / factor


def dequantise_fp8(codes: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values [N, K] of e4m3fn codes whose `scale` [⌈N/rows⌉, ⌈K/columns⌉] covers blocks of (rows, columns)."""
    rows, columns = codes.shape
    spread = scale.double().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return _once(codes.float().double() * spread, dtype)


def to_e2m1(x: Tensor) -> Tensor:
    """Codes 0 … 15 (uint8) of the nearest 4-bit floats, ties to the even code, beyond 6 → 6; −0.2 keeps its sign."""
    size = x.float().abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def from_e2m1(codes: Tensor) -> Tensor:
    """Float32 values of 4-bit float codes 0 … 15."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def quantise_nvfp4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [N, K] to NVFP4: (codes uint8 [N, K], scale e4m3fn [N, K/16], global scale float32 []).

    Value = e2m1(code)·scale·global, with global = max|W|/2688 over the whole tensor and scale =
    e4m3(max|block|/(6·global)) kept within 2^−9 … 448; a block of zeros stores 1.
    """
    groups = _groups(w, NVFP4_GROUP)
    most = groups.abs().amax(-1)
    total = most.amax() / (E2M1_VALUES[-1] * FP8_MAX)
    total = torch.where(total == 0, torch.ones_like(total), total)
    wanted = (most / (E2M1_VALUES[-1] * total)).masked_fill(most == 0, 1.0)
    scale = wanted.clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    codes = to_e2m1(groups / (scale.float() * total).unsqueeze(-1))
    return codes.flatten(1), scale, total


def dequantise_nvfp4(codes: Tensor, scale: Tensor, total: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values [N, K] of NVFP4 codes uint8 [N, K], scales e4m3fn [N, K/16] and the global scale float32 []."""
    values = from_e2m1(codes).double().unflatten(1, (-1, NVFP4_GROUP))
    step = scale.float().double() * total.double()
    return _once(values * step.unsqueeze(-1), dtype).flatten(1)


def quantise_activations(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Quantise activations [..., K] to e4m3fn as they arrive: (codes [..., K], scale float32 [..., K/group]).

    scale = max|x|/448 over each `group` consecutive inputs of a token, or over the whole token for None;
    code = cast(x/scale), all in float32. Value = code·scale.
    """
    columns = x.shape[-1]
    if group is not None and columns % group:
        raise ValueError(f"K={columns} is not a multiple of the activation group of {group}")
    groups = x.float().unflatten(-1, (-1, group or columns))
    scale = groups.abs().amax(-1).clamp(min=AMAX_FLOOR) / FP8_MAX
    return to_fp8(groups / scale.unsqueeze(-1)).flatten(-2), scale


def dequantise_activations(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact products code·scale, float64 [..., K]: a kernel keeps them apart until its accumulators are scaled."""
    groups = codes.float().double().unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.double().unsqueeze(-1)).flatten(-2)
