"""The timing protocol, in ten lines; change `VERSION` with any of them: other versions are never compared.

1. A variant that passed its gate gets K working sets of its own (inputs, states, caches, weights), of at least
   eight times the last-level cache together where memory allows, 1 ≤ K ≤ 64; it is warmed up on other contents.
2. On a GPU the K calls are captured as one CUDA graph; what can't be captured is launched call by call (`eager`).
3. Before each sample every set gets new contents, from seeds that the parent draws for that round and that no
   other round or warm-up has seen (all rivals of a round get the same), and its outputs are poisoned.
4. Then the L2 is flushed: persisting lines reset, twice its size written, twice its size read, and a part written
   that is as large as the op's own share of writes, so that writing back is neither given nor charged.
5. A sample is the time between two events around the K calls, over K; the stream is kept busy while they are
   enqueued, so that launching is not in it. On a CPU it is `perf_counter_ns` around the K calls, over K.
6. Rivals are sampled block by block, in an order shuffled each round, until every verdict is clear or the budget is
   spent. The parent's own clock runs beside: a block's samples can't exceed it, nor an untimed run's pace deny them.
7. Figure: median of the rounds' medians; interval: 95 %, order statistics over rounds. Verdict: paired bootstrap of
   the ratio over common rounds, with an equivalence band (`stats.py`).
8. Beside it: the same graph on one set (`warm`), the call's own time without and with synchronising (`launch`,
   `call`), and the one-off `prepare`.
9. After the race the gate judges the outputs of one timed call, drawn from all after they were made, and copied then.
10. A time below nine tenths of the limit (cost at this machine's measured ceilings) is a failed measurement.
"""

from __future__ import annotations

import dataclasses

VERSION = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """The protocol's numbers for one way of timing.

    `band`: relative difference below which two rivals count as equal; `band_us`: the same in µs, whichever is
    larger. `block_s`: how long a block should take, seconds. `samples`: fewest and most samples of a block.
    `rounds`: fewest rounds before a verdict can stop the race, and the most that are run. `warm_up_s`: how long calls
    are repeated before the first sample. `renewal_s`: making new contents for one sample takes about this long at
    most, at the price of fewer sets. `span_s`: length of the untimed run whose pace is held against the
    samples, `slack`: by how much the pace may exceed them.
    """

    band: float
    band_us: float = 0.1
    block_s: float = 0.3
    samples: tuple[int, int] = (2, 20)
    rounds: tuple[int, int] = (8, 200)
    warm_up_s: float = 0.3
    renewal_s: float = 0.15
    span_s: float = 0.05
    slack: float = 1.6


SETTINGS = {
    "graph": Settings(band=0.02),
    "eager": Settings(band=0.03),
    "cpu": Settings(band=0.05, band_us=0.5, rounds=(6, 60), warm_up_s=0.1, renewal_s=0.1, span_s=0.1, slack=2.5),
    "interpreted": Settings(
        band=0.05, band_us=0.5, block_s=0.0, samples=(1, 1), rounds=(3, 6), warm_up_s=0.0, span_s=0.0, slack=2.5
    ),
}
"""Numbers by mode: `graph` and `eager` on a GPU, `cpu`, and `interpreted` (Triton's interpreter)."""

MOST_SETS = 64
"""Most working sets of one variant."""

CACHES_FILLED = 8
"""How many times the last-level cache the working sets fill together, where memory allows."""

BELOW = 0.9
"""A median below this share of the limit is a failed measurement."""

CONFIDENCE = 0.95
"""Of every interval."""

FEWEST = 3
"""Rounds below which nothing is decided."""
