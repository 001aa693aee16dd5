"""Layouts of integer codes in checkpoints: lossless rearrangements between codes and 32-bit words.

compressed-tensors, GPTQ and AWQ store the same unsigned codes and zero points in different word orders. Each
`pack_*` takes `IntegerCodes` and returns the checkpoint's tensors by their names there; `unpack_*` is its inverse.
A word holds 32/bits codes; code j of a word lies at bits bits·j.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .grids import IntegerCodes

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output (within eight) that AWQ keeps in nibble j of a word."""


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., n] into int32 [..., n·bits/32] along the last dimension, lowest bits first.

    Raises ValueError where n codes do not fill whole words.
    """
    per_word = 32 // bits
    if codes.shape[-1] % per_word:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole words of {per_word}")
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (codes.long().unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the upper half becomes the negative numbers


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Undo `pack_words`: int32 [..., m] → uint8 [..., m·32/bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    return ((words.long().unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def pack_compressed_tensors(codes: IntegerCodes) -> dict[str, Tensor]:
    """Tensors of compressed-tensors' `pack-quantized`.

    weight_packed int32 [N, K·bits/32] along K, weight_scale [N, K/G], weight_shape int64 [2], and for the
    asymmetric grid weight_zero_point int32 [N·bits/32, K/G], packed along N.
    """
    tensors = {
        "weight_packed": pack_words(codes.codes, codes.bits),
        "weight_scale": codes.scale,
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }
    if codes.zeros is not None:
        tensors["weight_zero_point"] = pack_words(codes.zeros.T, codes.bits).T.contiguous()
    return tensors


def unpack_compressed_tensors(tensors: Mapping[str, Tensor], bits: int) -> IntegerCodes:
    """Undo `pack_compressed_tensors`; symmetric if there is no weight_zero_point.

    Raises ValueError where weight_shape contradicts the packed tensor.
    """
    codes = unpack_words(tensors["weight_packed"], bits)
    shape = tensors["weight_shape"].tolist()
    if list(codes.shape) != shape:
        raise ValueError(f"weight_shape says {shape}, weight_packed holds {list(codes.shape)} codes of {bits} bits")
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = unpack_words(zeros.T, bits).T.contiguous()
    return IntegerCodes(bits, codes, tensors["weight_scale"], zeros)


def _whole_word_ones(bits: int) -> int:
    """A word with 1 in each of its codes: 0x11111111 or 0x01010101."""
    return sum(1 << shift for shift in range(0, 32, bits))


def pack_gptq(codes: IntegerCodes, version: int = 1) -> dict[str, Tensor]:
    """Tensors of a GPTQ checkpoint.

    qweight int32 [K·bits/32, N] along K, qzeros int32 [K/G, N·bits/32] along N, scales float16 [K/G, N], g_idx
    int32 [K]. Version 1 stores zero − 1 by one subtraction from the whole word (a zero point of 0 borrows from
    its neighbour), version 2 the zero point itself. The symmetric grid's zero is 2^(bits−1).
    """
    if version not in (1, 2):
        raise ValueError(f"GPTQ has checkpoint versions 1 and 2, not {version}")
    zeros = codes.zeros
    if zeros is None:
        zeros = torch.full_like(codes.scale, 2 ** (codes.bits - 1), dtype=torch.uint8)
    qzeros = pack_words(zeros.T, codes.bits)
    if version == 1:
        qzeros = _wrap(qzeros.long() - _whole_word_ones(codes.bits))
    return {
        "qweight": pack_words(codes.codes, codes.bits).T.contiguous(),
        "qzeros": qzeros,
        "scales": codes.scale.T.to(torch.float16).contiguous(),
        "g_idx": torch.arange(codes.codes.shape[1], dtype=torch.int32, device=qzeros.device) // codes.group,
    }


def _wrap(words: Tensor) -> Tensor:
    """Reduce int64 words to the int32 with the same low 32 bits."""
    words = words & 0xFFFFFFFF
    return (words - ((words >> 31) << 32)).to(torch.int32)


def unpack_gptq(tensors: Mapping[str, Tensor], bits: int, version: int = 1) -> IntegerCodes:
    """Undo `pack_gptq`; the zero points come back even where they are those of the symmetric grid.

    Raises ValueError where g_idx does not list contiguous groups (`desc_act`).
    """
    if version not in (1, 2):
        raise ValueError(f"GPTQ has checkpoint versions 1 and 2, not {version}")
    qzeros = tensors["qzeros"]
    if version == 1:
        qzeros = _wrap(qzeros.long() + _whole_word_ones(bits))
    codes = unpack_words(tensors["qweight"].T, bits)
    scale = tensors["scales"].T.contiguous()
    group = codes.shape[1] // scale.shape[1]
    expected = torch.arange(codes.shape[1], device=codes.device) // group
    if not torch.equal(tensors["g_idx"].long(), expected):
        raise ValueError(f"g_idx does not list contiguous groups of {group}: activation order is not supported")
    return IntegerCodes(bits, codes, scale, unpack_words(qzeros, bits).T.contiguous())


def pack_awq(codes: IntegerCodes) -> dict[str, Tensor]:
    """Tensors of an AWQ "gemm" checkpoint (4 bits, with zero points).

    qweight int32 [K, N/8] and qzeros int32 [K/G, N/8] along N in `AWQ_ORDER`, scales float16 [K/G, N].
    """
    if codes.bits != 4 or codes.zeros is None:
        raise ValueError("AWQ's gemm layout holds 4-bit codes with zero points")
    return {
        "qweight": pack_words(_interleave(codes.codes.T, AWQ_ORDER), 4),
        "qzeros": pack_words(_interleave(codes.zeros.T, AWQ_ORDER), 4),
        "scales": codes.scale.T.to(torch.float16).contiguous(),
    }


def _interleave(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    if codes.shape[-1] % 8:
        raise ValueError(f"N={codes.shape[-1]} is not a multiple of 8")
    return codes.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)


def unpack_awq(tensors: Mapping[str, Tensor]) -> IntegerCodes:
    """Undo `pack_awq`."""
    inverse = tuple(AWQ_ORDER.index(i) for i in range(8))
    codes = _interleave(unpack_words(tensors["qweight"], 4), inverse).T.contiguous()
    zeros = _interleave(unpack_words(tensors["qzeros"], 4), inverse).T.contiguous()
    return IntegerCodes(4, codes, tensors["scales"].T.contiguous(), zeros)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [N, K] into bytes uint8 [N, K/2], the even input in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`: uint8 [N, K/2] → uint8 [N, K]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def swizzle_scales(scale: Tensor) -> Tensor:
    """Order NVFP4 block scales [N, C] (one byte each) as tensor cores read them: flat uint8, padded with zeros.

    N is padded to 128 rows and C to 4 columns; scale (n, c) goes to byte
    ((n//128)·(C/4) + c//4)·512 + (n%32)·16 + ((n%128)//32)·4 + c%4, with C the padded width.
    """
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle_scales` for [rows, columns] scales: uint8 [rows, columns]."""
    tall, wide = -(-rows // 128), -(-columns // 4)
    tiles = swizzled.reshape(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall * 128, wide * 4)[:rows, :columns].contiguous()
