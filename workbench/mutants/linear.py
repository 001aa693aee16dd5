"""The law of linear layers with one rule bent at a time; every one of these must fail the gate of `linear`."""

from __future__ import annotations

from workbench.contract import Mutant

_PRODUCT = "return bf16(x.double() @ weight.double().mT, precision)"
_INTEGER = "whole = codes.codes.to(torch.int16).unflatten(1, (codes.scale.shape[1], -1)) - zeros"
_INTEGER_VALUE = "return _once(whole.double() * codes.scale.double().unsqueeze(-1), dtype).flatten(1)"
_SPREAD = "spread = scale.double().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]"
_SHIFTS = "return ((words.long().unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)"
_NIBBLES = "return torch.stack((packed & 15, packed >> 4), -1).flatten(1)"
_TABLE = "return table[codes.long()]"
_STEP = "step = scale.float().double() * total.double()"
_BF16_SUM = """parts = zip(x.split(64, -1), weight.split(64, -1))
    total = torch.zeros((), device=x.device)
    for a, b in parts:
        total = bf16(total + bf16(a.double() @ b.double().mT, precision), precision)
    return total"""
_TOKEN = "scale = groups.abs().amax(-1).clamp(min=AMAX_FLOOR) / FP8_MAX"

PRODUCT = (
    Mutant(
        "tail_dropped",
        "every input counts, the last one too",
        "numerics.py",
        _PRODUCT,
        _PRODUCT.replace("x.", "x[..., :-1].").replace("weight.", "weight[:, :-1]."),
    ),
    Mutant(
        "last_chunk_dropped",
        "inputs past the last whole 128 count",
        "numerics.py",
        _PRODUCT,
        "k = max(64, (x.shape[-1] - 1) // 128 * 128)\n    "
        + _PRODUCT.replace("x.", "x[..., :k].").replace("weight.", "weight[:, :k]."),
    ),
    Mutant(
        "sum_in_bf16",
        "sums are at least float32, not bfloat16 from 64 inputs to the next",
        "numerics.py",
        _PRODUCT,
        _BF16_SUM,
    ),
    Mutant(
        "inputs_in_fp8",
        "bf16 activations are not quantised",
        "formats.py",
        'if weight.activations == "bf16":\n        return x',
        'if weight.activations == "bf16":\n        return grids.to_fp8(x).double()',
    ),
    Mutant(
        "last_output_stale",
        "the last output has its own row of the weight",
        "numerics.py",
        _PRODUCT,
        "weight = torch.cat((weight[:-1], weight[-2:-1]))\n    " + _PRODUCT,
    ),
)

FORMATS = (
    Mutant(
        "zero_point_less_one",
        "a symmetric code's zero is 2^(bits−1): 8, not 7",
        "grids.py",
        _INTEGER,
        _INTEGER + " + 1",
    ),
    Mutant(
        "codes_signed",
        "codes are stored with an offset, not in two's complement",
        "grids.py",
        _INTEGER,
        _INTEGER + "\n    whole = torch.where(whole >= 0, whole - zeros, whole + zeros)",
    ),
    Mutant(
        "scale_of_next_group",
        "input k has the scale of group k//128",
        "grids.py",
        _INTEGER_VALUE,
        _INTEGER_VALUE.replace("codes.scale.double()", "codes.scale.double().roll(-1, 1)"),
    ),
    Mutant(
        "scale_of_next_row",
        "each output has its own scales",
        "grids.py",
        _INTEGER_VALUE,
        _INTEGER_VALUE.replace("codes.scale.double()", "codes.scale.double().roll(-1, 0)"),
    ),
    Mutant(
        "words_from_the_top",
        "the lowest bits of a word are its first input",
        "layouts.py",
        _SHIFTS,
        _SHIFTS.replace(".flatten(-2)", ".flip(-1).flatten(-2)"),
    ),
    Mutant(
        "words_interleaved",
        "the codes of a word are in order, not in AWQ's",
        "layouts.py",
        _SHIFTS,
        "order = [0, 4, 1, 5, 2, 6, 3, 7] if bits == 4 else [0, 2, 1, 3]\n    "
        + _SHIFTS.replace(".flatten(-2)", "[..., order].flatten(-2)"),
    ),
    Mutant(
        "fp8_scale_inverted",
        "an fp8 scale multiplies the code",
        "grids.py",
        _SPREAD,
        _SPREAD.replace("scale.double()", "(1 / scale.double())"),
    ),
    Mutant(
        "fp8_rows_shifted",
        "an fp8 row or block has its own scale, not that of the one before",
        "grids.py",
        _SPREAD,
        _SPREAD.replace("scale.double()", "scale.double().roll(1, 0)"),
    ),
    Mutant(
        "fp8_blocks_shifted",
        "a block of 128 inputs has its own scale",
        "grids.py",
        _SPREAD,
        _SPREAD.replace("scale.double()", "scale.double().roll(1, 1)"),
    ),
    Mutant(
        "fp8_block_of_64",
        "a block's scale covers 128 outputs",
        "grids.py",
        _SPREAD,
        _SPREAD.replace(
            "repeat_interleave(block[0], 0)[:rows]", "repeat_interleave(max(block[0] // 2, 1), 0).repeat(2, 1)[:rows]"
        ),
    ),
    Mutant(
        "nibbles_swapped",
        "the even input lies in a byte's low nibble",
        "layouts.py",
        _NIBBLES,
        "return torch.stack((packed >> 4, packed & 15), -1).flatten(1)",
    ),
    Mutant(
        "e2m1_top_is_five",
        "the largest 4-bit float is 6",
        "grids.py",
        _TABLE,
        "return table.clamp(-5, 5)[codes.long()]",
    ),
    Mutant(
        "e2m1_sign_lost", "bit 3 of a 4-bit float is its sign", "grids.py", _TABLE, "return table.abs()[codes.long()]"
    ),
    Mutant(
        "nvfp4_global_inverted",
        "the global scale multiplies",
        "grids.py",
        _STEP,
        "step = scale.float().double() / total.double()",
    ),
    Mutant("nvfp4_global_left_out", "the global scale counts", "grids.py", _STEP, "step = scale.float().double()"),
    Mutant(
        "nvfp4_scale_of_32",
        "a block of 16 inputs has its own scale",
        "grids.py",
        _STEP,
        _STEP + "\n    step = step[:, ::2].repeat_interleave(2, 1)[:, : step.shape[1]]",
    ),
    Mutant(
        "activations_by_tensor",
        "each token has its own activation scale",
        "grids.py",
        _TOKEN,
        _TOKEN.replace("amax(-1)", "amax().expand(groups.shape[:-1])"),
        "outliers",
    ),
    Mutant(
        "activations_to_240",
        "activations use the grid up to 448",
        "grids.py",
        _TOKEN,
        _TOKEN.replace("FP8_MAX", "(FP8_MAX * 1.25)"),
    ),
    Mutant(
        "activations_unquantised",
        "fp8 activations are quantised",
        "formats.py",
        'if weight.activations == "bf16":',
        "if True:",
    ),
    Mutant(
        "activation_group_left_out",
        "fp8_block quantises each 128 inputs by themselves",
        "formats.py",
        '"fp8_block": grids.FP8_BLOCK}',
        '"fp8_block": None}',
        "outliers",
    ),
)

MUTANTS = (*PRODUCT, *FORMATS)
