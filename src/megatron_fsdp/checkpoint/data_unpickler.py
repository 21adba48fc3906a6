"""A machine for pickles that does data and nothing else.

Pickles are programs. Python's own machine lets them import, call anything they find, set attributes of classes and of
shared objects, and reach back into what other pickles have loaded; the one in C reserves gigabytes for a memo where
damage makes it read a large number. This one runs the operations that ordinary data need. Each name in a pickle is
looked up by `find_class`, only what that gave is called or filled, and nothing is set on a class, a function or a
shared object. Damaged bytes, which are programs too, are thereby refused without side effects.

Most operations take a byte of the pickle and make one small object. Those that can do more with a byte (copy what was
read before, hash keys) are counted by a `ReadingBudget`, and so is the result, as a tree: shared parts as often as they
are met. Whoever walks through it afterwards need not fear that it has no end.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import pathlib
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from megatron_fsdp.checkpoint.reading_budget import BETWEEN_LOOKS, ELEMENT_BYTES, MAX_DEPTH, ReadingBudget

_AS_USUAL = (
    pickle.PROTO,
    pickle.MARK,
    pickle.POP,
    pickle.POP_MARK,
    pickle.NONE,
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    pickle.BININT,
    pickle.BININT1,
    pickle.BININT2,
    pickle.LONG1,
    pickle.BINFLOAT,
    pickle.BINUNICODE,
    pickle.SHORT_BINUNICODE,
    pickle.BINUNICODE8,
    pickle.BINBYTES,
    pickle.SHORT_BINBYTES,
    pickle.BINBYTES8,
    pickle.EMPTY_TUPLE,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.EMPTY_LIST,
    pickle.EMPTY_DICT,
    pickle.EMPTY_SET,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.MEMOIZE,
    pickle.BINPERSID,
)
"""What picklers write for data since protocol 2 and Python's machine may do as it does; others are below or refused."""

_PLAIN = frozenset({float, bool, type(None), torch.dtype, torch.device})
_ATOMS = _PLAIN | {int, complex, torch.Size, torch.layout, torch.Tensor, torch.nn.Parameter}
_TEXTS = frozenset({str, bytes, bytearray})
_CONTAINERS = (list, tuple, set, frozenset, dict, torch.Size, collections.OrderedDict, collections.Counter)
_ELEMENT_COSTS: dict[Any, int] = {**dict.fromkeys(_TEXTS, 1), **dict.fromkeys(_CONTAINERS, ELEMENT_BYTES)}
_SHORT, _LONG = 64, 256  # characters that count as no more than an element; that few things share
_MAX_KEY_ITEMS, _MAX_KEY_DEPTH, _MAX_KEY_NUMBER = 64, 2, 1 << 64
_FILLED_BY_DICT = frozenset({collections.OrderedDict, collections.Counter, argparse.Namespace})


Builders = Mapping[type, Callable[[Any, Any], None]]


class Opaque:
    """What is left of an object whose class belongs to a package that is not imported: its name and its data.

    Attributes:
        qualified_name: Module and class.
        arguments: What it was made with.
        state: What was set on it; None if nothing was.
        items: Elements, where it was a kind of list or dict.
    """

    qualified_name = "unknown"

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        """Keep the arguments; nothing is called."""
        made = super().__new__(cls)
        made.arguments = (*args, *kwargs.items())
        made.state = None
        made.items = []
        return made

    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __repr__(self) -> str:
        return f"<{self.qualified_name}, not read>"


@dataclass(frozen=True)
class Keyed:
    """Stands for a kind of set or dict that is made of a list: the machine fills it itself, since keys are hashed."""

    kind: Callable[..., Any]


class _Operations(dict[int, Callable[[Any], None]]):
    """Of each operation what it does; operations that data do not need are refused."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        def refuse(_machine: Any) -> None:
            raise pickle.UnpicklingError(f"operation {code:#04x} of pickles is not one that data need")

        return refuse


class DataUnpickler(pickle._Unpickler):
    """Reads one pickle; subclasses say in `find_class` which names there are, and what stands for them.

    Args:
        stream: Bytes in memory; all of them are read.
    """

    builders: Builders = MappingProxyType({TensorProperties: lambda made, state: made.__setstate__(state)})
    """How objects of some classes take their state (object, state), instead of by their `__dict__`."""

    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._stream = stream
        self.budget = ReadingBudget(stream.seek(0, io.SEEK_END))
        stream.seek(0)
        self._found: dict[tuple[str, str], Any] = {}  # what find_class gave
        self._named: set[int] = set()  # the ids of that

    def load(self) -> Any:
        """Run the pickle.

        Returns:
            What it makes.

        Raises:
            OverBudgetError: It makes more than its size allows, or nests too deep.
        """
        self.metastack: list[list[Any]] = []
        self.stack, self.proto = [], 0
        self.append = self.stack.append
        self.read, self.readline = self._stream.read, self._stream.readline  # frames need no care: all is in memory
        read, operations = self.read, self.dispatch
        self._is_done = self._shares = False
        while not self._is_done:
            code = read(1)
            if not code:
                raise EOFError("it ends too early")
            operations[code[0]](self)
        made = self.stack.pop()
        if self._shares:  # else the tree is no larger than the pickle
            self._require_tree(made)
        return made

    def _require_tree(self, value: Any) -> None:
        """Count all that is met on a walk through a value, shared parts each time; what contains itself has no end."""
        level: list[Any] = [[value]]
        spend, depth = self.budget.spend, 0
        while level:
            below: list[Any] = []
            for here in level:
                parts = _parts(here)
                spend(here.nbytes if type(here).__module__ == "numpy" else ELEMENT_BYTES * (1 + len(parts)))
                for part in parts:
                    kind = type(part)
                    if kind in _TEXTS:
                        if len(part) > _SHORT:
                            spend(len(part))
                    elif kind not in _ATOMS:
                        below.append(part)
            level, depth = below, depth + 1
            if depth > MAX_DEPTH + 1:
                raise pickle.UnpicklingError(f"parts that contain each other more than {MAX_DEPTH} deep")

    def _weigh(self, given: Collection[Any]) -> None:
        """Count what is handed to a function, which may copy it."""
        total = 0
        for part in given:
            cost = _ELEMENT_COSTS.get(type(part))
            if cost:
                total += cost * len(part)
        self.budget.spend(total)

    def _get(self) -> None:
        self._push(self.memo[self.read(1)[0]])

    def _long_get(self) -> None:
        self._push(self.memo[int.from_bytes(self.read(4), "little")])

    def _push(self, known: Any) -> None:
        """Something that the pickle has made before."""
        kind = type(known)
        if kind in _TEXTS:
            self._shares |= len(known) > _LONG
        elif not (kind in _ATOMS or id(known) in self._named or isinstance(known, enum.Enum)):
            self._shares = True
        self.append(known)

    def _long_number(self) -> None:
        raise pickle.UnpicklingError("a whole number of more than 255 bytes, which no checkpoint needs")

    def _stop(self) -> None:
        self._is_done = True

    def _frame(self) -> None:
        self.read(8)

    def get_named(self, module_name: str, global_name: str) -> Any:
        """Look a name up, and note that it may be called."""
        found = self._found.get((module_name, global_name))
        if found is None:
            found = self._found[module_name, global_name] = self.find_class(module_name, global_name)
            self._named.add(id(found))
        return found

    def _global(self) -> None:
        module_name, global_name = (self.readline()[:-1].decode("utf-8") for _ in range(2))
        self.append(self.get_named(module_name, global_name))

    def _stack_global(self) -> None:
        global_name, module_name = self.stack.pop(), self.stack.pop()
        if type(global_name) is not str or type(module_name) is not str:
            raise pickle.UnpicklingError("a name that is not text")
        self.append(self.get_named(module_name, global_name))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        if id(function) not in self._named or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"a call of {type(function).__name__}, which is not a name")
        if isinstance(function, type) and dataclasses.is_dataclass(function):
            raise pickle.UnpicklingError(f"a call of {function.__name__}, which picklers make without one")
        if type(function) is Keyed:
            self.stack[-1] = self._keyed(function.kind, *arguments)
        else:
            self._weigh(arguments)
            self.stack[-1] = function(*arguments)

    def _keyed(self, kind: Callable[..., Any], items: Any = ()) -> Any:
        """A set or dict of what a list holds, keys or pairs."""
        if type(items) not in (list, tuple):
            raise pickle.UnpicklingError(f"a {type(items).__name__} where a list should stand")
        if not items:
            return kind()
        if kind is not collections.OrderedDict:
            return kind(self._keys(items, ELEMENT_BYTES))
        keys = self._keys([key for key, _ in items], ELEMENT_BYTES)
        return kind(zip(keys, [value for _, value in items], strict=True))

    def _keys(self, keys: Iterable[Any], cost: int = 0) -> Iterator[Any]:
        """The same one by one, counted before each is hashed and compared with others of its hash.

        Args:
            keys: Anything.
            cost: Of each, besides.
        """
        spent = 0
        for key in keys:
            kind = type(key)
            if kind is int and -_MAX_KEY_NUMBER < key < _MAX_KEY_NUMBER:
                spent += ELEMENT_BYTES + cost
            elif kind is str and len(key) <= _SHORT:
                spent += cost
            else:
                spent += key_cost(key) + cost
            if spent > BETWEEN_LOOKS:
                self.budget.spend(spent)
                spent = 0
            yield key
        self.budget.spend(spent)

    def _new(self) -> None:
        arguments = self.stack.pop()
        self._make(self.stack.pop(), arguments, {})

    def _new_with_names(self) -> None:
        keywords, arguments = self.stack.pop(), self.stack.pop()
        self._make(self.stack.pop(), arguments, keywords)

    def _make(self, kind: Any, arguments: Any, keywords: Any) -> None:
        known = isinstance(kind, type) and id(kind) in self._named and not issubclass(kind, enum.Enum)
        if not known or type(arguments) is not tuple or type(keywords) is not dict:
            raise pickle.UnpicklingError(f"an object of {kind!s:.100}, which is not a class of data")
        self._weigh((arguments, keywords))
        self.append(kind.__new__(kind, *arguments, **keywords))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        kind = type(made)
        self._weigh(state if type(state) is tuple else (state,))
        builder = self.builders.get(kind)
        if isinstance(made, Opaque):
            made.state = state
        elif builder is not None:
            builder(made, state)
        elif not isinstance(made, enum.Enum) and (kind in _FILLED_BY_DICT or id(kind) in self._named):
            if type(state) is not dict or any(type(name) is not str for name in state):
                raise pickle.UnpicklingError(f"a state of {kind.__name__} that is not a dict of names")
            made.__dict__.update(state)
        else:
            raise pickle.UnpicklingError(f"attributes to set on {kind.__name__}, which takes none")

    def _append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.items.extend(items)
        elif type(target) is list:
            target.extend(items)
        else:
            raise pickle.UnpicklingError(f"elements for {type(target).__name__}, which is not a list")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.items.extend(zip(flat[::2], flat[1::2], strict=True))
            return
        if type(target) not in (dict, collections.OrderedDict, collections.Counter):
            raise pickle.UnpicklingError(f"items for {type(target).__name__}, which is not a dict")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if type(key) is not str or len(key) > _SHORT:
                self.budget.spend(key_cost(key))
            target[key] = value

    def _add_items(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise pickle.UnpicklingError(f"elements for {type(target).__name__}, which is not a set")
        target.update(self._keys(items))

    def _frozenset(self) -> None:
        self.append(frozenset(self._keys(self.pop_mark())))

    dispatch: ClassVar[Any] = _Operations(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _AS_USUAL}
        | {
            pickle.STOP[0]: _stop,
            pickle.LONG4[0]: _long_number,
            pickle.BINGET[0]: _get,
            pickle.LONG_BINGET[0]: _long_get,
            pickle.FRAME[0]: _frame,
            pickle.GLOBAL[0]: _global,
            pickle.STACK_GLOBAL[0]: _stack_global,
            pickle.REDUCE[0]: _reduce,
            pickle.NEWOBJ[0]: _new,
            pickle.NEWOBJ_EX[0]: _new_with_names,
            pickle.BUILD[0]: _build,
            pickle.APPEND[0]: _append,
            pickle.APPENDS[0]: _appends,
            pickle.SETITEM[0]: _set_item,
            pickle.SETITEMS[0]: _set_items,
            pickle.ADDITEMS[0]: _add_items,
            pickle.FROZENSET[0]: _frozenset,
        }
    )


def key_cost(key: Any, depth: int = 0) -> int:
    """What hashing and comparing something counts, which may be asked for again and again.

    Tuples of tuples that name each other take time exponential in the length of their pickle to hash, deep ones end the
    process, and of large numbers and complex ones endless many have one hash.

    Raises:
        pickle.UnpicklingError: It is not a plain value, a shallow tuple of such, a path or an index of DCP.
    """
    kind = type(key)
    if kind is int and -_MAX_KEY_NUMBER < key < _MAX_KEY_NUMBER:
        return ELEMENT_BYTES
    if kind is str or kind is bytes:
        return ELEMENT_BYTES + len(key)
    if kind is MetadataIndex:
        return key_cost((key.fqn, key.offset), depth)
    if isinstance(key, pathlib.PurePath):
        return ELEMENT_BYTES + len(str(key))
    if (kind is tuple or kind is torch.Size) and depth < _MAX_KEY_DEPTH and len(key) <= _MAX_KEY_ITEMS:
        cost = ELEMENT_BYTES
        for item in key:
            cost += key_cost(item, depth + 1)
        return cost
    if kind in _PLAIN or isinstance(key, enum.Enum):
        return ELEMENT_BYTES
    raise pickle.UnpicklingError(f"a key of type {kind.__name__}, or one that is too large or nests too deep")


def _parts(value: Any) -> Collection[Any]:
    """What an object consists of, as far as anyone looks into it."""
    kind = type(value)
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return value
    if isinstance(value, dict):
        own = vars(value).values() if kind is not dict else ()
        return [*value, *value.values(), *own]
    if isinstance(value, Opaque):
        return value.arguments, value.state, value.items
    if kind is argparse.Namespace or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return vars(value).values()
    return ()
