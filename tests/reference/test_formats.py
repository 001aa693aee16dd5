"""The low-bit formats against what the libraries that define them wrote.

Digests are the first 16 hex digits of SHA-256 over a tensor's bytes, taken on the test matrix from
compressed-tensors 0.19.0, GPTQModel 7.7.0, AutoAWQ 0.2.9 and modelopt 0.47.0.
"""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
from torch import Tensor

from reference import formats, grids, layouts
from reference.numerics import ORACLE
from reference.random import normal


def digest(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def words(t: Tensor) -> list[str]:
    return [f"{x & 0xFFFFFFFF:08x}" for x in t.flatten().tolist()]


@pytest.fixture
def matrix() -> Tensor:
    """`(((37·i + 11·r) mod 64) − 31)/128`, float32 [32, 64]; exact in bfloat16."""
    r, i = torch.arange(32)[:, None], torch.arange(64)[None]
    return ((37 * i + 11 * r) % 64 - 31).float() / 128


def normals(*shape: int, scale: float = 1.0) -> Tensor:
    return normal(7, shape, scale=scale, dtype=torch.float32)


INTEGER = {
    # bits, symmetric, scale dtype: packed, scale, zero points, dequantised (in the scale's dtype)
    (4, True, torch.float32): ("f93f1e8b39fd83a1", "dc58d58e4002c90d", None, "b16cefe60a302ec1"),
    (4, False, torch.float32): ("66f2d7d456b36205", "5f8df67b9fe285cc", "4e0e0d71fa439afb", "ff4a9387d10cfec4"),
    (8, True, torch.float32): ("03cc1f273a4727f3", "c5b2fecf601b7151", None, "e50999e76b940f52"),
    (8, False, torch.float32): ("835f085fb072de62", "438bbc374708ce8c", "afb144f3e7e8e2ec", "7a92723715491f87"),
    (4, True, torch.bfloat16): ("f93f1e8b39fd83a1", "6fb16defa7132a25", None, "9e2d413d43825ca8"),
    (4, False, torch.bfloat16): ("db44558e6452e686", "497db3e6618b641d", "4e0e0d71fa439afb", "4c6027dbd8cbd488"),
    (8, True, torch.bfloat16): ("23aad7b3a4684f58", "ac94f080b4d11719", None, "237b0d3a6a19a9ef"),
    (8, False, torch.bfloat16): ("af50d4d47918337f", "0c943ed10c666792", "afb144f3e7e8e2ec", "bf275424723c86f4"),
}


@pytest.mark.parametrize(("bits", "symmetric", "dtype"), list(INTEGER))
def test_integer_grid_digests(matrix: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    codes = grids.quantise_integer(matrix, bits, 32, symmetric=symmetric, scale_dtype=dtype)
    tensors = layouts.pack_compressed_tensors(codes)
    packed, scale, zeros, values = INTEGER[bits, symmetric, dtype]
    assert digest(tensors["weight_packed"]) == packed
    assert digest(tensors["weight_scale"]) == scale
    assert (digest(tensors["weight_zero_point"]) if "weight_zero_point" in tensors else None) == zeros
    assert digest(grids.dequantise_integer(codes, dtype)) == values


@pytest.mark.parametrize(
    ("bits", "symmetric", "dtype", "row"),
    [
        (4, True, torch.bfloat16, "18e5c391 b28f6c4a 5c39f7d4 f6c4a18e 9f7d4b28 3a17e5b2 d4a18f6c 7e5b29f6"),
        (4, False, torch.float32, "07d4b280 a17e5c39 4b28f6c3 e5b2907d 8f6c3a17 2906d4a1 c3907e5b 6d4a18e5"),
        (8, True, torch.bfloat16, "c02d9805 117ce754 60cb39a4 b01d88f3"),
        (8, True, torch.float32, "c02c9804 107ce854 60cc38a4 b01c88f4 ff6cd844 50bc2894 a00c78e4 f05cc834"),
        (8, False, torch.float32, "be289500 0c79e650 5dca34a1 ae1885f2"),
    ],
)
def test_compressed_tensors_words(matrix: Tensor, bits: int, symmetric: bool, dtype: torch.dtype, row: str) -> None:
    codes = grids.quantise_integer(matrix, bits, 32, symmetric=symmetric, scale_dtype=dtype)
    got = words(layouts.pack_compressed_tensors(codes)["weight_packed"][0])
    assert got[: len(row.split())] == row.split()


def test_scales_of_the_first_row(matrix: Tensor) -> None:
    def bits(scale: Tensor) -> list[str]:
        return [f"{x:04x}" for x in scale[0].view(torch.int16).tolist()]

    assert bits(grids.quantise_integer(matrix, 4, 32).scale) == ["3d09", "3d04"]
    assert bits(grids.quantise_integer(matrix, 4, 32, symmetric=False).scale) == ["3d06", "3d02"]


def test_asymmetric_zero_points_and_values(matrix: Tensor) -> None:
    codes = grids.quantise_integer(matrix, 4, 32, symmetric=False, scale_dtype=torch.float32)
    assert codes.zeros is not None
    assert (codes.zeros[:8, 0].int() - 8).tolist() == [-1, 0, -1, -1, -1, 0, -1, -1]
    assert words(layouts.pack_compressed_tensors(codes)["weight_zero_point"])[0] == "77877787"
    values = grids.dequantise_integer(codes, torch.float32)[0, :3]
    torch.testing.assert_close(values, torch.tensor([-0.2296875, 0.0328125, -0.1640625]), rtol=1e-7, atol=0)


def gptq_codes(matrix: Tensor, bits: int, symmetric: bool) -> grids.IntegerCodes:
    """GPTQ's writer: the grid is compressed-tensors', but w/s is rounded before the zero point is added."""
    codes = grids.quantise_integer(matrix, bits, 32, symmetric=symmetric, scale_dtype=torch.float32)
    if codes.zeros is None:
        return codes
    steps = (matrix.unflatten(1, (-1, 32)) / codes.scale.unsqueeze(-1)).round()
    return dataclasses.replace(
        codes, codes=(steps + codes.zeros.unsqueeze(-1)).clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)
    )


@pytest.mark.parametrize(
    ("bits", "symmetric", "qweight", "qzeros", "scales"),
    [
        (4, True, "327b968505fd1891", "e8b72e0b71c772f8", "174f606cb77c8b4d"),
        (4, False, "3f60707ffe536499", "92846309cf85306e", "b57036f5227e3485"),
        (8, True, "12927d0d1186429f", "1df1b7ce1fd8fcbe", "4c102ed81339fc93"),
    ],
)
def test_gptq_digests(matrix: Tensor, bits: int, symmetric: bool, qweight: str, qzeros: str, scales: str) -> None:
    tensors = layouts.pack_gptq(gptq_codes(matrix, bits, symmetric), version=2)
    assert [digest(tensors[name]) for name in ("qweight", "qzeros", "scales")] == [qweight, qzeros, scales]
    assert tensors["g_idx"].tolist() == [0] * 32 + [1] * 32


def test_gptq_words(matrix: Tensor) -> None:
    symmetric = layouts.pack_gptq(gptq_codes(matrix, 4, True))
    row = "18e5c391 b28f6c4a 5c39f7d4 f6c4a18e 9f7d4b28 3a17e5b2 d4a18f6c 7e5b29f6"
    assert words(symmetric["qweight"][:, 0]) == row.split()
    assert set(words(symmetric["qzeros"])) == {"77777777"}
    assert [f"{x:04x}" for x in symmetric["scales"][:, 0].view(torch.int16).tolist()] == ["2844", "2822"]
    asymmetric = gptq_codes(matrix, 4, False)
    assert words(layouts.pack_gptq(asymmetric)["qzeros"][0]) == ["66766676", "66766676", "66676667", "76676667"]
    assert words(layouts.pack_gptq(asymmetric, 2)["qzeros"][0]) == ["77877787", "77877787", "77787778", "87787778"]
    assert words(layouts.pack_gptq(asymmetric)["qweight"][:1, 0]) == ["07d4b280"]
    eight = layouts.pack_gptq(gptq_codes(matrix, 8, True))
    assert set(words(eight["qzeros"])) == {"7f7f7f7f"}
    assert words(eight["qweight"][:2, 0]) == ["c02c9804", "107ce854"]
    assert [f"{x:04x}" for x in eight["scales"][:, 0].view(torch.int16).tolist()] == ["1804", "17c8"]


def test_gptq_version_1_borrows_across_nibbles() -> None:
    zeros = torch.tensor([0, 8, 15, 3, 0, 1, 2, 7], dtype=torch.uint8)[:, None]
    codes = grids.IntegerCodes(4, torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1), zeros)
    assert words(layouts.pack_gptq(codes, 2)["qzeros"]) == ["72103f80"]
    old = layouts.pack_gptq(codes, 1)
    assert words(old["qzeros"]) == ["60ff2e6f"]
    restored = layouts.unpack_gptq(old, 4, 1).zeros
    assert restored is not None and restored.equal(zeros)


def test_awq_digests(matrix: Tensor) -> None:
    codes = gptq_codes(matrix, 4, False)
    tensors = layouts.pack_awq(codes)
    assert [digest(tensors[name]) for name in ("qweight", "qzeros", "scales")] == [
        "2035eca1173a8933",
        "21156f06b9d8bcc3",
        "b57036f5227e3485",
    ]
    assert codes.codes[:8, 0].tolist() == [0, 3, 5, 7, 10, 14, 0, 3]
    assert words(tensors["qweight"][0]) == ["3e730a50", "84d961b5", "e94ec71c", "6f942d72"]
    assert words(tensors["qweight"][1]) == ["c71c94e8", "2d72f94e", "82c751a6", "f83db70b"]
    assert words(tensors["qzeros"][0]) == ["78787777", "78787777", "77777878", "87777878"]
    assert [f"{x:04x}" for x in tensors["scales"][0, :4].view(torch.int16).tolist()] == ["2833", "2811", "2811", "2811"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layouts_are_bijections(bits: int, symmetric: bool) -> None:
    codes = grids.quantise_integer(normals(48, 96), bits, 32, symmetric=symmetric, scale_dtype=torch.float16)

    def same(other: grids.IntegerCodes, zeros: Tensor | None) -> None:
        assert other.codes.equal(codes.codes) and other.scale.equal(codes.scale) and other.group == 32
        assert (other.zeros is None) is (zeros is None)
        assert zeros is None or torch.equal(torch.as_tensor(other.zeros), zeros)

    same(layouts.unpack_compressed_tensors(layouts.pack_compressed_tensors(codes), bits), codes.zeros)
    stored = torch.full((48, 3), 2 ** (bits - 1), dtype=torch.uint8) if codes.zeros is None else codes.zeros
    for version in (1, 2):
        same(layouts.unpack_gptq(layouts.pack_gptq(codes, version), bits, version), stored)
    if bits == 4 and not symmetric:
        same(layouts.unpack_awq(layouts.pack_awq(codes)), codes.zeros)


def test_layouts_refuse_what_they_cannot_hold(matrix: Tensor) -> None:
    symmetric = grids.quantise_integer(matrix, 4, 32)
    with pytest.raises(ValueError, match="zero points"):
        layouts.pack_awq(symmetric)
    with pytest.raises(ValueError, match="versions 1 and 2"):
        layouts.pack_gptq(symmetric, 3)
    with pytest.raises(ValueError, match="whole words"):
        layouts.pack_words(torch.zeros(3, 12, dtype=torch.uint8), 4)
    shuffled = layouts.pack_gptq(symmetric)
    shuffled["g_idx"] = shuffled["g_idx"].flip(0)
    with pytest.raises(ValueError, match="g_idx"):
        layouts.unpack_gptq(shuffled, 4)
    wrong = layouts.pack_compressed_tensors(symmetric)
    wrong["weight_shape"] = torch.tensor([64, 32])
    with pytest.raises(ValueError, match="weight_shape"):
        layouts.unpack_compressed_tensors(wrong, 4)


def test_fp8_cast_rounds_half_to_even_and_saturates() -> None:
    x = torch.tensor([17.0, 19.0, 1e4, -1e4, 464.0])
    assert grids.to_fp8(x).float().tolist() == [16.0, 20.0, 448.0, -448.0, 448.0]


def test_fp8_rows(matrix: Tensor) -> None:
    codes, scale = grids.quantise_fp8_rows(matrix)
    assert digest(scale) == "489777778a9f066b"
    assert digest(codes) == "ed696d5270d057be"


def test_fp8_per_tensor_bytes(matrix: Tensor) -> None:
    row = matrix.reshape(1, -1)
    assert float(grids.quantise_fp8_rows(row)[1]) == 0.00055694580078125
    codes, _ = grids.quantise_fp8_rows(row, torch.float32)
    assert codes[0, :8].view(torch.uint8).tolist() == [0xFE, 0x6A, 0xF9, 0x76, 0xF2, 0x7B, 0xD6, 0xFC]
    assert codes[0, :8].float().tolist() == [-448.0, 80.0, -288.0, 224.0, -160.0, 352.0, -14.0, -384.0]


def test_fp8_blocks(matrix: Tensor) -> None:
    tall = matrix.repeat(8, 2)
    tall[128:] /= 2
    codes, scale = grids.quantise_fp8_blocks(tall)
    torch.testing.assert_close(scale, torch.tensor([[0.00055803574], [0.00027901787]]), rtol=1e-7, atol=0)
    assert codes[:128].view(torch.uint8).equal(codes[128:].view(torch.uint8))
    ragged, scales = grids.quantise_fp8_blocks(tall[:200])
    assert ragged.view(torch.uint8).equal(codes[:200].view(torch.uint8)) and scales.equal(scale)


def test_e2m1_rounds_ties_to_the_even_code() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 99.0, -0.2, -6.0])
    assert grids.to_e2m1(x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 15]
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert grids.from_e2m1(torch.arange(16)).tolist() == values + [-v for v in values]
    assert layouts.pack_nibbles(torch.arange(16, dtype=torch.uint8)[None]).tolist() == [
        [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    ]


def test_nvfp4(matrix: Tensor) -> None:
    codes, scale, total = grids.quantise_nvfp4(matrix)
    packed = layouts.pack_nibbles(codes)
    assert digest(packed) == "eb8decc66a0d65d9"
    assert digest(scale) == "bb117d1575201a42"
    assert digest(grids.dequantise_nvfp4(codes, scale, total)) == "8138531b735d54b7"
    assert layouts.unpack_nibbles(packed).equal(codes)


def test_nvfp4_example(matrix: Tensor) -> None:
    row = matrix.clone()
    row[0, :16] /= 16
    codes, scale, total = grids.quantise_nvfp4(row)
    assert float(1 / total) == pytest.approx(10752)
    assert scale[0].float().tolist() == [28.0, 448.0, 448.0, 416.0]
    assert scale[0].view(torch.uint8).tolist() == [0x5E, 0x7E, 0x7E, 0x7D]
    expected = "2f5e6cf8d3b6174e 6d7ae2c5963f5e7b e0d4a6275e6cf9e3 c5074f6d7be1d5a6".replace(" ", "")
    assert bytes(layouts.pack_nibbles(codes)[0].tolist()).hex() == expected


def test_nvfp4_scale_order() -> None:
    scale = torch.arange(160 * 6).remainder(251).to(torch.uint8).reshape(160, 6)
    flat = layouts.swizzle_scales(scale)
    assert flat.numel() == 256 * 8
    assert flat[533] == scale[33, 5] and flat[1568] == scale[130, 4]
    assert layouts.unswizzle_scales(flat, 160, 6).equal(scale)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_zero_weights_dequantise_to_plus_zero(format: str) -> None:
    weight = formats.quantise(format, torch.zeros(128, 256, dtype=torch.bfloat16))
    assert weight.dequantise().view(torch.int16).count_nonzero() == 0
    if format == "w4a16":
        assert set(words(weight.tensors["packed"])) == {"88888888"}
        assert float(weight.tensors["scale"][0, 0]) == 0.0078125


@pytest.mark.parametrize(
    ("format", "low", "high"),
    [("bf16", 0, 0.002), ("fp8_row", 0.025, 0.028), ("fp8_block", 0.025, 0.028), ("w8a16", 0.006, 0.007)]
    + [("w4a16", 0.105, 0.117), ("nvfp4", 0.09, 0.10)],
)
def test_error_on_gaussian_weights_is_in_its_band(format: str, low: float, high: float) -> None:
    w = normals(256, 1024, scale=0.02)
    error = formats.quantise(format, w).dequantise().float() - w
    assert low <= float(error.norm() / w.norm()) <= high


@pytest.mark.parametrize("format", formats.FORMATS)
def test_weight_keeps_its_books(format: str) -> None:
    weight = formats.quantise(format, normals(144, 384).to(torch.bfloat16))
    assert weight.shape == (144, 384) and weight.device.type == "cpu"
    assert weight.nbytes == formats.stored_bytes(format, 144, 384)
    twin = weight.map(torch.clone)
    assert twin.dequantise().equal(weight.dequantise())
    assert all(twin.tensors[n].data_ptr() != t.data_ptr() for n, t in weight.tensors.items())
    exact = weight.dequantise(ORACLE)
    assert exact.dtype is torch.float64
    assert exact.float().to(torch.bfloat16).equal(weight.dequantise())


@pytest.mark.parametrize(
    ("format", "shape", "activations", "message"),
    [
        ("int3", (8, 128), "bf16", "'int3' is none of bf16"),
        ("w4a16", (8, 192), "bf16", "w4a16: K=192 is not a multiple of the group of 128"),
        ("nvfp4", (8, 24), "bf16", "nvfp4: K=24 is not a multiple of the group of 16"),
        ("fp8_block", (8, 64), "bf16", "fp8_block: K=64 is not a multiple of the block of 128"),
        ("bf16", (8,), "bf16", "two dimensions"),
        ("w8a16", (0, 128), "bf16", "above 0"),
        ("bf16", (8, 128), "fp8", "activations=fp8 needs format=fp8_row or fp8_block, not bf16"),
        ("fp8_row", (8, 128), "int8", "'int8' are none of bf16, fp8"),
    ],
)
def test_bad_weights_are_named(format: str, shape: tuple[int, ...], activations: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        formats.quantise(format, torch.zeros(shape), activations)


def test_activations_of_a_token() -> None:
    x = normals(5, 256).to(torch.bfloat16)
    x[3] = 0
    codes, scale = grids.quantise_activations(x, None)
    assert scale.shape == (5, 1) and scale[:3].equal(x[:3].float().abs().amax(1, keepdim=True) / 448)
    values = grids.dequantise_activations(codes, scale)
    assert not values[3].any() and values.isfinite().all()
    assert float((values - x.double()).norm() / x.double().norm()) < 0.03
    alone = grids.dequantise_activations(*grids.quantise_activations(x[1:2], None))
    assert alone.equal(values[1:2])
    grouped, scales = grids.quantise_activations(x, 128)
    half = grids.quantise_activations(x[:, 128:], None)
    assert scales.shape == (5, 2) and scales[:, 1:].equal(half[1])
    assert grouped[:, 128:].view(torch.uint8).equal(half[0].view(torch.uint8))
    with pytest.raises(ValueError, match="activation group of 128"):
        grids.quantise_activations(x[:, :100], 128)
