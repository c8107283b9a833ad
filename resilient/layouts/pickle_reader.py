"""Decoder of pickles as data, which interprets the opcodes but imports and calls nothing.

A call in a pickle becomes a value that describes the call (:class:`PickledCall`). The user of this
module can replace calls of a few names that only rebuild data, such as tensors and ordered dicts,
by this data. All other calls keep their name. The names show the kind of a file, and the effects of
unpickling the file. Source of the opcodes: ``pickletools`` of the standard library, which also
decodes their arguments.

The number of bytes and of opcodes is bounded. Keys of dicts must be plain values or flat tuples,
because hashing nested tuples can take unbounded time. If a pickle refers to one value several
times, the result contains this value only once. Memory therefore grows only with the number of
opcodes. A walk visits such a value several times, so it must have bounds too (:func:`leaves`).
"""

from __future__ import annotations

import io
import pickletools
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class PickledGlobal:
    """A global that a pickle would import."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """Module and name joined by a dot."""
        return f"{self.module}.{self.name}"


class Unordered(list[Any]):
    """Elements of a set, without an order."""


@dataclass(slots=True, eq=False)
class PickledCall:
    """A call that a pickle would make, and the state that it would set on the result."""

    name: Any
    args: Any = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The dotted name of the called global."""
        return self.name.dotted if isinstance(self.name, PickledGlobal) else ""

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute that the state would set."""
        for state in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(state, dict) and attribute in state:
                return state[attribute]
        return default


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A reference to bytes beside the pickle: a storage of torch.

    ``device`` is its device at the save, such as ``cuda:0``.
    """

    dtype: str
    key: str
    elements: int
    device: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor whose bytes are outside the pickle; ``offset`` and ``strides`` in elements."""

    dtype: str
    shape: tuple[int, ...]
    storage: StorageRef | None = None
    offset: int = 0
    strides: tuple[int, ...] | None = None


BYTES_MAX = 64 << 20
"""Largest pickle. A pickle beside tensors has some KB, an index of 100,000 tensors 20 MB."""
OPCODES_MAX = 4_000_000
LEAVES_MAX = 1_000_000
DEPTH_MAX = 64
_KEY_INT_MAX = 1 << 60  # beyond this size, all multiples of 2^61-1 have one hash
_MARK = object()


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value, and every global that the pickle would import to make it."""

    value: Any
    names: frozenset[PickledGlobal]


def read_pickle(
    source: bytes | io.BytesIO, rebuild: Callable[[PickledCall], Any] = lambda call: call
) -> Pickled:
    """Return the content of a pickle as data.

    Args:
        source: The pickle, or a stream at the start of a pickle; the stream ends up after the
            pickle.
        rebuild: Function that turns a call with a known name into a value.

    Raises:
        Unreadable: The pickle is broken, exceeds the bounds, or uses an opcode no checkpoint needs.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    if stream.getbuffer().nbytes > BYTES_MAX:
        raise Unreadable(f"a pickle of more than {BYTES_MAX} bytes")
    machine = _Machine(rebuild)
    _walk(machine, stream)
    return Pickled(machine.result(), frozenset(machine.names))


def read_names(stream: io.BytesIO) -> tuple[frozenset[PickledGlobal], str]:
    """Return the globals of one pickle, and the reason if it cannot be read to its end.

    The result includes globals before the damage, because unpickling would have called them.

    Args:
        stream: Stream at the start of the pickle; it ends up after the pickle.
    """
    machine = _Machine(lambda call: call)
    try:
        _walk(machine, stream)
    except Unreadable as error:
        return frozenset(machine.names), str(error)
    return frozenset(machine.names), ""


def _walk(machine: _Machine, stream: io.BytesIO) -> None:
    """Run a machine over one pickle, to its end.

    Raises:
        Unreadable: The pickle is broken, exceeds the bounds, or uses an opcode no checkpoint needs.
    """
    try:
        with warnings.catch_warnings():
            # Suppress warnings about invalid escapes in a damaged file.
            warnings.simplefilter("ignore", DeprecationWarning)
            for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
                if count >= OPCODES_MAX:
                    raise Unreadable(f"a pickle of more than {OPCODES_MAX} opcodes")
                if opcode.name == "STOP":
                    machine.result()
                    return
                machine.step(opcode.name, argument)
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
        raise Unreadable(f"not a complete pickle ({str(error)[:120]})") from error
    raise Unreadable("a pickle without an end")


def leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values inside dicts and lists, with their paths, within bounds.

    Raises:
        Unreadable: The value is deeper or larger than any checkpoint.
    """
    pending_values: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    for _ in range(LEAVES_MAX):
        if not pending_values:
            return
        path, item = pending_values.pop()
        if isinstance(item, dict | list | tuple):
            if len(path) >= DEPTH_MAX:
                raise Unreadable(f"more than {DEPTH_MAX} levels of nested values")
            if len(item) + len(pending_values) > LEAVES_MAX:
                break
            pairs = list(item.items() if isinstance(item, dict) else enumerate(item))
            pending_values += [((*path, key), inner) for key, inner in reversed(pairs)]
        else:
            yield path, item
    raise Unreadable(f"more than {LEAVES_MAX} values")


_PUSHES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": Unordered,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Stack and memo of the interpreted pickle."""

    def __init__(self, rebuild: Callable[[PickledCall], Any]) -> None:
        self.stack: list[Any] = []
        self.names: set[PickledGlobal] = set()
        self._memo: dict[int, Any] = {}
        self._rebuild = rebuild

    def step(self, opcode: str, argument: Any) -> None:
        """Interpret one opcode."""
        if opcode in _PUSHES:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            self.stack.append(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            self._gather(_TUPLES[opcode])
        elif opcode not in ("PROTO", "FRAME"):
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise Unreadable(f"the opcode {opcode}, which no checkpoint needs")
            handler(self, argument)

    def result(self) -> Any:
        """Return the value on top of the stack."""
        if self.stack[-1] is _MARK:
            raise ValueError("it ends at a mark")
        return self.stack[-1]

    def _gather(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("too few values on the stack")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def _since_mark(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise ValueError("no mark")

    def mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def pop(self, _: Any) -> None:
        self.stack.pop()

    def pop_mark(self, _: Any) -> None:
        self._since_mark()

    def duplicate(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def put(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def as_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def as_list(self, _: Any) -> None:
        self.stack.append(self._since_mark())

    def as_dict(self, _: Any) -> None:
        items = self._since_mark()
        self.stack.append({})
        self._set(items)

    def append(self, _: Any) -> None:
        value = self.stack.pop()
        _extend(self.stack[-1], [value])

    def appends(self, _: Any) -> None:
        items = self._since_mark()
        _extend(self.stack[-1], items)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self, _: Any) -> None:
        self._set(self._since_mark())

    def _set(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if len(flat) % 2:
            raise ValueError("a key without a value")
        if isinstance(target, dict):
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                target[_hashable_key(key)] = value
        elif isinstance(target, PickledCall):
            target.items += flat
        else:
            raise TypeError("items of an object without items")

    def import_name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_global(module, name)

    def import_stacked(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a name that is not text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        value = PickledGlobal(module, name)
        self.names.add(value)
        self.stack.append(value)

    def reduce(self, _: Any) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        self.stack.append(self._rebuild(PickledCall(name, args)))

    def new(self, _: Any) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        self.stack.append(PickledCall(name, args))

    def new_with_names(self, _: Any) -> None:
        kwargs, args, name = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(PickledCall(name, args, kwargs))

    def instance(self, argument: str) -> None:
        args = tuple(self._since_mark())
        self.import_name(argument)
        self.stack.append(PickledCall(self.stack.pop(), args))

    def as_object(self, _: Any) -> None:
        items = self._since_mark()
        self.stack.append(PickledCall(items[0], tuple(items[1:])))

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], PickledCall):
            self.stack[-1].state = state

    def stored(self, argument: Any) -> None:
        key = self.stack.pop() if argument is None else argument
        self.stack.append(self._rebuild(PickledCall("persistent", key)))

    def frozen(self, _: Any) -> None:
        self.stack.append(Unordered(self._since_mark()))


def _hashable_key(key: Any) -> Any:
    """Return a key that hashes in bounded time: a plain value, or a flat tuple of plain values."""
    if isinstance(key, tuple):
        if len(key) > DEPTH_MAX or not all(_is_plain(element) for element in key):
            raise Unreadable("a tuple as a key with values that are not plain")
        return key
    if _is_plain(key) or isinstance(key, PickledCall | PickledGlobal):
        return key
    raise Unreadable(f"a {type(key).__name__} as a key")


def _is_plain(key: Any) -> bool:
    if isinstance(key, int):
        return -_KEY_INT_MAX < key < _KEY_INT_MAX
    return key is None or isinstance(key, str | bytes | float)


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, PickledCall):
        target.items += values
    elif isinstance(target, list):
        target += values
    else:
        raise TypeError("an item of an object that is not a list")


_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark, "POP": _Machine.pop, "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate, "MEMOIZE": _Machine.memoize,
    "PUT": _Machine.put, "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put,
    "GET": _Machine.get, "BINGET": _Machine.get, "LONG_BINGET": _Machine.get,
    "TUPLE": _Machine.as_tuple, "LIST": _Machine.as_list, "DICT": _Machine.as_dict,
    "APPEND": _Machine.append, "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item, "SETITEMS": _Machine.set_items, "ADDITEMS": _Machine.appends,
    "FROZENSET": _Machine.frozen, "GLOBAL": _Machine.import_name,
    "STACK_GLOBAL": _Machine.import_stacked, "REDUCE": _Machine.reduce, "NEWOBJ": _Machine.new,
    "NEWOBJ_EX": _Machine.new_with_names, "INST": _Machine.instance, "OBJ": _Machine.as_object,
    "BUILD": _Machine.build, "PERSID": _Machine.stored, "BINPERSID": _Machine.stored,
}  # fmt: skip
