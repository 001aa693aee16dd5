"""Results as tables for people: a race, and the words and numbers in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from workbench.record import Measurement, Mode, Status, Verdict
from workbench.timing.protocol import FEWEST

if TYPE_CHECKING:
    from workbench.sweep import Outcome, Result

COLOURS = {Verdict.FASTER: "green", Verdict.SAME: "cyan", Verdict.SLOWER: "", Verdict.UNDECIDED: "yellow"}

MODES = {
    Mode.GRAPH: "GPU time by events over CUDA-graph replays, L2 cold",
    Mode.EAGER: "GPU time by events, launched call by call",
    Mode.CPU: "CPU time",
    Mode.INTERPRETED: "Triton's interpreter on the CPU",
}


def number(value: float | None) -> str:
    """Four digits that matter, thousands separated; a dash for what was not measured."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}"


def spread(low: float | None, value: float | None, high: float | None) -> str:
    """A figure with its interval: `12.31 [12.28, 12.40]`."""
    if value is None:
        return "–"
    return number(value) if low is None else f"{number(value)} [{number(low)}, {number(high)}]"


def share(value: float | None) -> str:
    """A share of the limit in per cent; what rounds to nothing is not nothing."""
    return "–" if value is None else "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def verdict(row: Measurement) -> Text:
    """The verdict in words: `SLOWER 1.52× [1.50, 1.54]` than the first, or that of the first over the next."""
    if row.verdict is None or row.ratio is None:
        return Text("alone" if row.status is Status.OK else "")
    assert row.ratio_low is not None and row.ratio_high is not None
    low, value, high = row.ratio_low, row.ratio, row.ratio_high
    if row.verdict is Verdict.FASTER:
        low, value, high = 1 / high, 1 / value, 1 / low
    than = f" than {row.versus}" if row.rank == 1 and row.verdict is Verdict.FASTER else ""
    as_ = f" as {row.versus}" if row.rank == 1 and row.verdict is Verdict.SAME else ""
    against = f" against {row.versus}" if row.rank == 1 and row.verdict is Verdict.UNDECIDED else ""
    text = f"{row.verdict.value}{than}{as_}{against} {value:.3g}× [{low:.3g}, {high:.3g}]"
    rounds = len(row.rounds_us)
    if row.verdict is Verdict.UNDECIDED and rounds < FEWEST:
        text += f", {rounds} {'round' if rounds == 1 else 'rounds'} only"
    return Text(text, style=COLOURS[row.verdict])


def race_table(result: Result) -> Table:
    """One workload's race: who came where, and why the others did not."""
    rows = result.rows
    table = Table(title=f"{rows[0].op}  {result.workload.label}", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("variant")
    table.add_column("µs, median [95 %]", justify="right")
    table.add_column("warm", justify="right")
    table.add_column("launch", justify="right")
    table.add_column("of limit", justify="right")
    table.add_column("verdict")
    table.add_column("gate")
    table.add_column("note")
    table.add_column("id")
    for row, name in zip(rows, [*result.ids, *[""] * (len(rows) - len(result.ids))]):
        table.add_row(
            str(row.rank or ""),
            row.label,
            spread(row.latency_low_us, row.latency_us, row.latency_high_us),
            number(row.warm_us),
            number(row.launch_us),
            share(row.share_of_limit),
            verdict(row),
            _gate(row),
            _note(row),
            name,
        )
    return table


def _gate(row: Measurement) -> Text:
    if row.gate is None:
        return Text("–")
    return Text(f"passed {row.gate}") if row.gate_passed else Text(f"FAILED {row.gate}", style="red")


def _note(row: Measurement) -> Text:
    if row.status is not Status.OK:
        quiet = row.status in (Status.REFUSED, Status.UNAVAILABLE, Status.INTERRUPTED)
        reason = (row.reason or "").strip()
        shown = reason if len(reason) <= 300 else reason[:297] + "…"
        return Text(f"{row.status.value.replace('_', ' ')}: {shown}", style="yellow" if quiet else "red")
    parts = [] if row.mode is Mode.GRAPH or row.mode is None else [row.mode.value]
    throttled = sorted({reason for condition in row.conditions for reason in condition.get("throttled") or ()})
    parts += [f"throttled: {', '.join(throttled)}"] if throttled else []
    parts += [row.note] if row.note else []
    return Text("; ".join(parts), style="yellow" if throttled else "")


def footer(outcome: Outcome, store: str) -> list[str]:
    """Under the tables: machine, ceilings, how it was timed, where it is kept."""
    machine = outcome.machine
    modes = [row.mode for result in outcome.results for row in result.rows if row.status is Status.OK and row.mode]
    lines = [machine_line(machine)]
    if outcome.ceilings is not None:
        lines.append(f"ceilings measured here: {outcome.ceilings.label}")
    if modes:
        how = "; ".join(text for mode, text in MODES.items() if mode in modes)
        lines.append(f"protocol {machine['protocol']}: {how}")
    stopped = ", ".join(sorted({result.stopped for result in outcome.results})) or "nothing was raced"
    lines.append(f"run {outcome.run} in {store}: {stopped}; `workbench show ID` tells all of a row")
    return lines


def machine_line(machine: Mapping[str, Any]) -> str:
    """A machine in one line."""
    packages = machine.get("packages", {})
    versions = [f"torch {packages.get('torch')}"]
    versions += [f"Triton {packages['triton']}"] if packages.get("triton") else []
    if machine.get("gpu"):
        where = f"{machine['gpu']} ({machine['arch']}), driver {machine['driver']}, CUDA {machine['cuda']}"
    else:
        where = f"{machine.get('cpu')}, {machine.get('cores')} cores"
    return f"{where}, {', '.join(versions)}"


def spelling(variant: str, parameters: Mapping[str, Any]) -> str:
    """A variant with its parameters, as `variant=` takes it: `triton_fused:block_v=64:num_warps=4`."""
    return ":".join([variant, *(f"{name}={value}" for name, value in parameters.items())])


def repeat_line(row: Measurement, plugins: Sequence[str] = ()) -> str:
    """The one line that measures this again, against nobody."""
    words = ["workbench", "bench", f"op={row.op}", f"variant={spelling(row.variant, row.parameters)}"]
    words += row.workload.split()
    words += [f"device={row.fingerprint.get('device', 'cpu')}"]
    if row.origin.endswith(".py"):
        words.append(f"plugin={row.origin}")
    return shlex.join(words)
