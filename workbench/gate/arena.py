"""Where a variant's arguments lie during the gate: guarded, poisoned, checksummed.

Every storage behind the arguments is copied into a buffer of the arena with a band on either side. Bands, the
gaps between the rows of strided views, and outputs (unless `inout`) are filled with a poison: a NaN of a
distinct payload, or for integers a number that is no index. So what is read outside an argument shows as NaN,
what is written outside it changes a band, and what is not written keeps its poison. The gate reads results
through the arena's own buffers, never through the tensors that the variant was given.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.contract import Output

BAND = 1 << 16
"""Bytes of a guard band: eight rows of the widest output, so that a whole row past the end is seen."""

_POISON = {
    torch.bfloat16: 0x7FD5,
    torch.float16: 0x7ED5,
    torch.float32: 0x7FD5A5A5,
    torch.float64: 0x7FFD5A5AA5A5A5A5,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.int64: -0x5A5A5A5A5A5A5A5B,
    torch.int32: -0x5A5A5A5B,
    torch.int16: -0x5A5B,
    torch.int8: -0x5B,
    torch.uint8: 0xA5,
    torch.bool: 1,
}
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, SplitMix64's increment


def bits(x: Tensor) -> Tensor:
    """`x` seen as integers of its own width, without a copy: equal bits are equal integers."""
    word = torch.int8 if x.dtype is torch.int8 else _WORD[x.element_size()]
    return x if x.dtype is word else x.view(word)


def poison(dtype: torch.dtype) -> int:
    """The poison of `dtype`, as `bits` shows it."""
    return _POISON[dtype]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside an argument, with its path: in dataclasses, mappings and sequences."""
    if isinstance(value, Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from walk(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from walk(item, f"{path}.{i}" if path else str(i))


def rebuild(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """A copy of an argument with every tensor replaced; whatever holds no tensor is shared."""
    if isinstance(value, Tensor):
        return replace(value)
    if not any(True for _ in walk(value)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, rebuild(getattr(value, field.name), replace))
        return twin
    if isinstance(value, Mapping):
        return {key: rebuild(item, replace) for key, item in value.items()}
    items = (rebuild(item, replace) for item in value)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def size_in_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of all storages behind `args`, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in walk(dict(args))}.values())


def layout(args: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must agree for new contents to fit the same addresses: paths, shapes, strides, dtypes, scalars."""
    tensors = tuple(
        (p, t.shape, t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes()) for p, t in walk(dict(args))
    )
    return tensors, tuple((k, v) for k, v in args.items() if isinstance(v, (bool, int, float, str)))


def checksum(buffer: Tensor, chunk: int = 1 << 22) -> int:
    """A 64-bit sum of a uint8 buffer's words (length a multiple of 8), each weighted by its place."""
    words, total = buffer.view(torch.int64), torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        weight = torch.arange(start, start + part.numel(), dtype=torch.int64, device=buffer.device)
        total += (part * weight.mul_(_GAMMA).bitwise_or_(1)).sum()
    return int(total)


@dataclasses.dataclass(frozen=True)
class Breach:
    """Something outside the outputs that a variant did to its arguments; `what` is `rebound`, `input` or `bounds`."""

    what: str
    argument: str
    detail: str
    index: tuple[int, ...] = ()


@dataclasses.dataclass
class _Slab:
    """One storage's copy: `area` is the storage itself inside `buffer`, between its bands.

    `leaves` are the gate's own tensors on it by path, `writable` the paths of outputs among them, `gaps` marks
    the elements of `area` that no leaf covers (None: there are none), `kept` holds read-only leaves that share
    the storage of an output, `sum` the checksum of a storage without outputs.
    """

    buffer: Tensor
    area: Tensor
    dtype: torch.dtype
    leaves: dict[str, Tensor]
    writable: tuple[str, ...]
    gaps: Tensor | None
    sum: int = 0
    kept: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Arena:
    """Copies of an op's arguments at fixed addresses; `args` is what the variant is called with.

    `prototype` supplies the layout and the first contents; `load` brings other contents of the same layout to the
    same addresses.
    """

    def __init__(self, prototype: Mapping[str, Any], outputs: Mapping[str, Output]) -> None:
        """See the class."""
        self.outputs = outputs
        self.layout = layout(prototype)
        self._slabs: list[_Slab] = []
        groups: dict[int, list[tuple[str, Tensor]]] = {}
        for path, tensor in walk(dict(prototype)):
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append((path, tensor))
        given: dict[int, Tensor] = {}
        for leaves in groups.values():
            self._place(leaves, given)
        self.args: dict[str, Any] = {name: rebuild(value, lambda t: given[id(t)]) for name, value in prototype.items()}
        self._given = {path: (tensor, _identity(tensor)) for path, tensor in walk(self.args)}
        self.load(prototype)

    def _place(self, leaves: list[tuple[str, Tensor]], given: dict[int, Tensor]) -> None:
        first = leaves[0][1]
        size = first.untyped_storage().nbytes()
        buffer = torch.empty(2 * BAND + -(-size // 8) * 8, dtype=torch.uint8, device=first.device)
        covered = torch.zeros(size, dtype=torch.bool, device=first.device)
        own = {}
        for path, tensor in leaves:
            item = tensor.element_size()
            place = (BAND // item + tensor.storage_offset(), tensor.shape, tensor.stride())
            # set_ makes tensors that are views of no other, as a caller's own would be
            given[id(tensor)] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                buffer.untyped_storage(), *place
            )
            own[path] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(buffer.untyped_storage(), *place)
            strides = (*(step * item for step in tensor.stride()), 1)
            if tensor.numel():
                covered.as_strided((*tensor.shape, item), strides, tensor.storage_offset() * item).fill_(True)
        gaps = None if bool(covered.all()) else ~covered[:: first.element_size()]
        writable = tuple(path for path in own if path in self.outputs)
        self._slabs.append(_Slab(buffer, buffer[BAND : BAND + size], first.dtype, own, writable, gaps))

    def load(self, args: Mapping[str, Any]) -> None:
        """Bring the contents of `args` in, poison outputs, gaps and bands, and note the checksums."""
        sources = dict(walk(dict(args)))
        for slab in self._slabs:
            typed = bits(slab.buffer.view(slab.dtype))
            typed[: BAND // slab.dtype.itemsize] = poison(slab.dtype)
            typed[(BAND + slab.area.numel()) // slab.dtype.itemsize :] = poison(slab.dtype)
            storage = next(iter(sources[path] for path in slab.leaves)).untyped_storage()
            slab.area.copy_(torch.empty(0, dtype=torch.uint8, device=slab.area.device).set_(storage))
            if slab.gaps is not None:
                bits(slab.area.view(slab.dtype))[slab.gaps] = poison(slab.dtype)
            for path in slab.writable:
                if not self.outputs[path].inout:
                    bits(slab.leaves[path]).fill_(poison(slab.leaves[path].dtype))
            if slab.writable:
                slab.kept = {path: leaf.clone() for path, leaf in slab.leaves.items() if path not in slab.writable}
            else:
                slab.sum = checksum(slab.buffer)

    def bring(self, args: Mapping[str, Any], *, inputs: bool = True) -> None:
        """Copy contents in and poison outputs on the current stream, without waiting for the device.

        With `inputs=False` only what a call may write is restored: outputs, states, caches.
        """
        sources = dict(walk(dict(args)))
        for slab in self._slabs:
            for path, leaf in slab.leaves.items():
                if path in slab.writable and not self.outputs[path].inout:
                    bits(leaf).fill_(poison(leaf.dtype))
                elif path in slab.writable or inputs:
                    leaf.copy_(sources[path])

    def snapshot(self) -> dict[str, Tensor]:
        """Contiguous copies of all outputs, read from the arena's own memory on the current stream."""
        return {
            path: slab.leaves[path].clone(memory_format=torch.contiguous_format)
            for slab in self._slabs
            for path in slab.writable
        }

    def inspect(self, pristine: Callable[[], Mapping[str, Any]]) -> Breach | None:
        """Find what a call did beside writing its outputs; `pristine` gives the contents loaded, to name the place."""
        now = dict(walk(self.args))
        for path, (tensor, identity) in self._given.items():
            if now.get(path) is not tensor or _identity(tensor) != identity:
                return Breach("rebound", path, "its memory, shape, strides or type is not what it was before the call")
        for slab in self._slabs:
            intact = bool(slab.writable) or checksum(slab.buffer) == slab.sum
            if intact and not slab.writable:
                continue
            breach = self._bounds(slab)
            if breach is None:
                sources = slab.kept if slab.writable else dict(walk(dict(pristine())))
                breach = self._inputs(slab, sources)
            if breach is None and not intact:
                breach = Breach("input", next(iter(slab.leaves)), "the memory of a read-only argument was changed")
            if breach is not None:
                return breach
        return None

    @staticmethod
    def _bounds(slab: _Slab) -> Breach | None:
        name = slab.writable[0] if slab.writable else next(iter(slab.leaves))
        mark, words = poison(slab.dtype), bits(slab.buffer.view(slab.dtype))
        begin, end = BAND // slab.dtype.itemsize, (BAND + slab.area.numel()) // slab.dtype.itemsize
        front = (words[:begin] != mark).nonzero()
        if len(front):
            return Breach("bounds", name, f"the {begin - int(front[0])} elements before its memory were written")
        back = (words[end:] != mark).nonzero()
        if len(back):
            return Breach("bounds", name, f"up to {int(back[-1]) + 1} elements past the end of its memory were written")
        if slab.gaps is not None:
            gap = ((words[begin:end] != mark) & slab.gaps).nonzero()
            if len(gap):
                return Breach(
                    "bounds", name, f"the gaps between its rows were written, {int(gap[0])} elements into its memory"
                )
        return None

    @staticmethod
    def _inputs(slab: _Slab, before: Mapping[str, Tensor]) -> Breach | None:
        for path, leaf in slab.leaves.items():
            if path in before:
                wrong = (bits(leaf) != bits(before[path])).nonzero()
                if len(wrong):
                    detail = f"{len(wrong)} of its elements were changed; it is read-only"
                    return Breach("input", path, detail, tuple(wrong[0].tolist()))
        return None


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, type(tensor)
