"""Mutants of the compressed keys and of the append."""

from __future__ import annotations

from workbench.contract import Mutant

_FILE = "compression.py"
_MEANS = "part.unfold(0, size, stride).mean(-1)"
_K1 = "_complete(k_cache, k1_cache, table, start, end, K1_SIZE, K1_STRIDE, precision)"
_K2 = "_complete(k_cache, k2_cache, table, start, end, K2_SIZE, K2_STRIDE, precision)"
_COMPRESSED = "scatter(compressed, table, first, compress(history, size, stride, precision))"
_HISTORY = "history = gather(k_cache, table, end - first * stride, first * stride)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("k1_window_of_16", "k1 averages the second half of its window", _FILE, _MEANS,
           "part.unfold(0, size, stride)[..., 16 if size == 32 else 0 :].mean(-1)"),
    Mutant("k1_window_of_31", "k1 leaves out the last key of its window", _FILE, _MEANS,
           "part.unfold(0, size, stride)[..., : size - 1 if size == 32 else size].mean(-1)"),
    Mutant("k2_window_of_127", "k2 leaves out the first key of its window", _FILE, _MEANS,
           "part.unfold(0, size, stride)[..., 1 if size == 128 else 0 :].mean(-1)"),
    Mutant("k2_window_of_64", "k2 averages one block, not two", _FILE, _MEANS,
           "part.unfold(0, size, stride)[..., : size // 2 if size == 128 else size].mean(-1)"),
    Mutant("k2_from_k1", "k2 averages the k1 rows within its window, which count the middle twice", _FILE, _MEANS,
           "part.unfold(0, size, stride).unfold(-1, 32, 16 if size == 128 else 32).mean((-1, -2))"),
    Mutant("sum_not_mean", "windows are summed", _FILE, _MEANS, "part.unfold(0, size, stride).sum(-1)"),
    Mutant("largest_not_mean", "the largest of a window is taken", _FILE, _MEANS,
           "part.unfold(0, size, stride).amax(-1)"),
    Mutant("one_key_early", "every window begins a key too early", _FILE, _MEANS,
           "part.roll(1, 0).unfold(0, size, stride).mean(-1)"),
    Mutant("sum_in_bfloat16", "every addition is rounded to bfloat16", _FILE, "means = " + _MEANS,
           "means = part.unfold(0, size, stride)[..., 0]\n"
           "        for i in range(1, size):\n"
           "            means = (means + part.unfold(0, size, stride)[..., i]).bfloat16().double()\n"
           "        means = means / size"),
    Mutant("first_window_left_out", "row 0 is never written: rows begin with the second window", _FILE,
           "first, count = window_count(start, size, stride), window_count(end, size, stride)",
           "first, count = max(1, window_count(start, size, stride)), window_count(end, size, stride)"),
    Mutant("last_window_missing", "a window is complete only with the key after its last", _FILE,
           "max(0, (keys - size) // stride + 1)", "max(0, (keys - size - 1) // stride + 1)"),
    Mutant("only_whole_in_piece", "a window that begins in an earlier piece is not completed", _FILE,
           "first, count = window_count(start, size, stride), window_count(end, size, stride)",
           "first, count = -(-start // stride), window_count(end, size, stride)"),
    Mutant("piece_taken_for_history", "keys before the piece are taken to be zero", _FILE, _HISTORY,
           _HISTORY + "\n        history[: max(0, start - first * stride)] = 0"),
    Mutant("row_one_late", "compressed rows are stored one place too late", _FILE, _COMPRESSED,
           "scatter(compressed, table, first + 1, compress(history, size, stride, precision))"),
    Mutant("heads_swapped", "the two heads of the compressed keys change places", _FILE, _COMPRESSED,
           "scatter(compressed, table, first, compress(history, size, stride, precision).flip(1))"),
    Mutant("k1_stride_in_k2", "k2 windows start every 16 keys", _FILE, _MEANS,
           "part.unfold(0, size, 16 if size == 128 else stride)[: last - first].mean(-1)"),
    Mutant("k1_never", "k1 is not completed", _FILE, _K1, "pass"),
    Mutant("k2_never", "k2 is not completed", _FILE, _K2, "pass"),
    Mutant("values_averaged", "values instead of keys are compressed", _FILE, _K1,
           _K1.replace("k_cache", "v_cache", 1)),
    Mutant("values_lost", "values are not stored", _FILE, "scatter(v_cache, table, start, values)", "pass"),
    Mutant("append_one_early", "keys are stored one place too early", _FILE, "scatter(k_cache, table, start, keys)",
           "scatter(k_cache, table, max(0, start - 1), keys)"),
    Mutant("page_order_ignored", "pages are taken to follow one another", "paging.py",
           "return table[index // rows].long()",
           "return (table[0] + index // rows).long() % table.amax().clamp_min(1)"),
)  # fmt: skip
