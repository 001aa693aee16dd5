"""`workbench ops`: what ops there are, and one op's contract in full."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, op_files, ops, variant_files

if TYPE_CHECKING:
    from workbench.contract import Axis, Contract, Cost, Workload


def _run(request: Request) -> Reply:
    if request["op"] is None:
        return _overview()
    from workbench.contract import contract

    pages = [_page(contract(op), request) for op in request["op"]]
    return Reply([page.data for page in pages], [part for page in pages for part in page.text])


def _overview() -> Reply:
    from rich.table import Table

    from workbench.contract import contract

    table = Table("op", "outputs", "presets", "variants", "what it computes", title="ops", title_justify="left")
    data = []
    for name in op_files():
        law = contract(name)
        outputs = {output: rule.tolerance.value for output, rule in law.outputs.items()}
        presets = {preset: len(sizes) for preset, sizes in law.presets.items()}
        variants = variant_files(name)
        data.append({"op": name, "summary": law.summary, "outputs": outputs, "presets": presets, "variants": variants})
        shown = ", ".join(f"{output}: {tolerance}" for output, tolerance in outputs.items())
        sizes = ", ".join(f"{preset} {count}" for preset, count in presets.items())
        table.add_row(name, shown, sizes, str(len(variants)), law.summary)
    return Reply(data, [table, "workbench ops op=NAME prints a contract."])


def _page(law: Contract, request: Request) -> Reply:
    from rich.table import Table

    parameters = inspect.signature(law.signature).parameters
    workloads = {"asked for": request.workloads(law)} if request.axes or request["preset"] else law.presets
    data: dict[str, Any] = {
        "op": law.name,
        "summary": law.summary,
        "doc": inspect.getdoc(law.signature),
        "arguments": [{"name": p.name, "type": _type(p)} for p in parameters.values()],
        "outputs": {
            name: {
                "tolerance": output.tolerance.value,
                "inout": output.inout,
                "multiple": output.multiple,
                "floor": output.floor,
            }
            for name, output in law.outputs.items()
        },
        "axes": {name: axis for name, axis in law.axes.items()},
        "weights": law.weights,
        "parts": law.parts,
        "regimes": law.regimes,
        "workloads": [
            {"preset": preset, "axes": dict(workload.axes), **_spent(law.cost(workload))}
            for preset, sizes in workloads.items()
            for workload in sizes
        ],
        "variants": variant_files(law.name),
        "file": inspect.getfile(inspect.unwrap(law.signature)),
    }
    axes = Table("axis", "default", "range", "what it is")
    for name, axis in law.axes.items():
        axes.add_row(f"{name}=", str(axis.default), _range(axis), axis.doc)
    outputs = Table("output", "judged by", "arrives")
    for name, output in law.outputs.items():
        rule = f"{output.tolerance.value}, {output.multiple:g} × the reference's own error"
        arrives = "with contents; what the law leaves alone must keep its bits" if output.inout else "poisoned"
        outputs.add_row(name, rule if output.tolerance.value == "oracle" else output.tolerance.value, arrives)
    sizes = Table("preset", "workload", "GFLOP", "MB read", "MB written", "FLOP/byte")
    for preset, found in workloads.items():
        for workload in found:
            sizes.add_row(preset, workload.label, *_shown(law, workload))
    facts = [f"regimes: {', '.join(law.regimes)}"]
    facts += [f"weights, the same from call to call: {', '.join(law.weights)}"] if law.weights else []
    facts += [f"composed of: {', '.join(law.parts)}"] if law.parts else []
    facts.append(f"variants: {', '.join(variant_files(law.name)) or 'none'}")
    facts.append(f"contract: {data['file']}")
    return Reply(data, [f"{law.name}: {law.summary}\n", _stub(law), axes, outputs, sizes, "\n".join(facts), ""])


def _type(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", str(annotation))


def _stub(law: Contract) -> str:
    """The contract's signature as it stands in its file, named as the op."""
    try:
        source = textwrap.dedent(inspect.getsource(law.signature))
    except OSError:  # made at run time
        source = f"def signature{inspect.signature(law.signature)}"
    return source.replace("def signature(", f"def {law.name}(", 1).rstrip() + "\n"


def _range(axis: Axis) -> str:
    from workbench.contract import format_size

    return ", ".join(axis.choices) or f"{axis.low} … {format_size(axis.high)}"


def _spent(cost: Cost) -> dict[str, Any]:
    return {
        "flops": cost.flops,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
        "rate": cost.rate,
    }


def _shown(law: Contract, workload: Workload) -> tuple[str, str, str, str]:
    cost = law.cost(workload)
    moved = cost.bytes_read + cost.bytes_written
    intensity = f"{cost.flops / moved:.3g}" if moved else ""
    return f"{cost.flops / 1e9:.4g}", f"{cost.bytes_read / 1e6:.4g}", f"{cost.bytes_written / 1e6:.4g}", intensity


COMMAND = Command(
    name="ops",
    summary="List the ops, or print an op's contract: arguments, axes, regimes, cost of its workloads.",
    keys=(Key("op", ops, "ops whose contract to print: a,b or all"),),
    run=_run,
    examples=(
        "workbench ops",
        "workbench ops op=lightning_decode",
        "workbench ops op=lightning_decode batch=1,8,32 context=1M",
    ),
    axes=True,
)
