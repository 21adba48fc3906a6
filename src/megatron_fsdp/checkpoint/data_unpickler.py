"""A machine for pickles that does data and nothing else.

Pickles are programs. Python's own machine lets them import, call anything they find, set attributes of classes and of
shared objects, and reach back into what other pickles have loaded; the one in C reserves gigabytes for a memo where
damage makes it read a large number. This one runs the operations that ordinary data need. Each name in a pickle is
looked up by `find_class`, only what that gave is called or filled, and nothing is set on a class, a function or a
shared object. Damaged bytes, which are programs too, are thereby refused without side effects.
"""

from __future__ import annotations

import argparse
import collections
import enum
import pathlib
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

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
    pickle.LONG4,
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
    pickle.BINGET,
    pickle.LONG_BINGET,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.MEMOIZE,
    pickle.BINPERSID,
)
"""What picklers write for data since protocol 2 and Python's machine may do as it does; others are below or refused."""

_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device})
_MAX_KEY_ITEMS, _MAX_KEY_DEPTH = 64, 2
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


class _Operations(dict[int, Callable[[Any], None]]):
    """Of each operation what it does; operations that data do not need are refused."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        def refuse(_machine: Any) -> None:
            raise pickle.UnpicklingError(f"operation {code:#04x} of pickles is not one that data need")

        return refuse


class DataUnpickler(pickle._Unpickler):
    """Reads one pickle; subclasses say in `find_class` which names there are, and what stands for them.

    Args:
        stream: All of it is read, so it should be bytes in memory.
    """

    builders: Builders = MappingProxyType({TensorProperties: lambda made, state: made.__setstate__(state)})
    """How objects of some classes take their state (object, state), instead of by their `__dict__`."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._stream = stream
        self._named: dict[int, Any] = {}  # what find_class gave, by id; held, so that ids stay theirs

    def load(self) -> Any:
        """Run the pickle.

        Returns:
            What it makes.
        """
        self.metastack: list[list[Any]] = []
        self.stack, self.proto = [], 0
        self.append = self.stack.append
        self.read, self.readline = self._stream.read, self._stream.readline  # frames need no care: all is in memory
        read, operations = self.read, self.dispatch
        self._is_done = False
        while not self._is_done:
            code = read(1)
            if not code:
                raise EOFError("it ends too early")
            operations[code[0]](self)
        return self.stack.pop()

    def _stop(self) -> None:
        self._is_done = True

    def _frame(self) -> None:
        self.read(8)

    def get_named(self, module_name: str, global_name: str) -> Any:
        """Look a name up, and note that it may be called."""
        found = self.find_class(module_name, global_name)
        self._named[id(found)] = found
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
        self.stack[-1] = function(*arguments)

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
        self.append(kind.__new__(kind, *arguments, **keywords))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        kind = type(made)
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
            require_key(key)
            target[key] = value

    def _add_items(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise pickle.UnpicklingError(f"elements for {type(target).__name__}, which is not a set")
        target.update(checked_keys(items))

    def _frozenset(self) -> None:
        self.append(frozenset(checked_keys(self.pop_mark())))

    dispatch: ClassVar[Any] = _Operations(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _AS_USUAL}
        | {
            pickle.STOP[0]: _stop,
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


def require_key(key: object, depth: int = 0) -> None:
    """Check that something can be hashed cheaply.

    Tuples of tuples that name each other take time exponential in the length of their pickle to hash, and deep ones end
    the process.

    Raises:
        pickle.UnpicklingError: It is not a plain value, a shallow tuple of such, a path or an index of DCP.
    """
    if type(key) in _PLAIN or isinstance(key, enum.Enum | pathlib.PurePath):
        return
    if type(key) is MetadataIndex:
        require_key(key.fqn, depth)
        require_key(key.offset, depth)
    elif type(key) in (tuple, torch.Size) and depth < _MAX_KEY_DEPTH and len(key) <= _MAX_KEY_ITEMS:  # type: ignore[arg-type]
        for item in key:  # type: ignore[attr-defined]
            require_key(item, depth + 1)
    else:
        raise pickle.UnpicklingError(f"a key of type {type(key).__name__}, or one that nests too deep")


def checked_keys(items: object) -> list[Any] | tuple[Any, ...]:
    """A list or tuple of which each element can be hashed cheaply.

    Raises:
        pickle.UnpicklingError: It is something else, or an element cannot.
    """
    if not isinstance(items, list | tuple):
        raise pickle.UnpicklingError(f"a {type(items).__name__} where a list should stand")
    for item in items:
        require_key(item)
    return items
