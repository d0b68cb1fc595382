"""The pickles inside torch's files, read as plain data, with no code run.

``pickle.Unpickler`` imports modules and calls what it finds there, so that a weights
file can run any program. The machine in this file knows the opcodes as operations on
data only; what a global or a call becomes is decided by the closed list in
``models/torch_objects.py``.

Format: the Python pickle protocol, versions 0 to 5 (documented in ``pickletools``); how
torch uses it was read off files that torch writes.
"""

import pickletools
import warnings
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from models.torch_objects import (
    TORCH_DTYPES,
    TorchGlobal,
    TorchRecord,
    build_call,
    checked_global,
    checked_key,
)


def load_pickle(
    stream: BinaryIO, load_storage: Callable[[tuple], np.ndarray], swap_bytes=False
):
    """Read one pickle from a stream, up to and including its end mark.

    Args:
        stream: a binary file; what follows the pickle is left unread.
        load_storage: gives the 1D array for a storage's persistent id, a tuple.
        swap_bytes: whether the storages that carry no type are in foreign byte order.

    Returns:
        Plain data: numbers, strings, lists, tuples, dicts, sets, numpy arrays,
        ``TorchGlobal`` and ``TorchRecord``.

    Raises:
        ValueError: says what is wrong with a damaged pickle.
    """
    try:
        with warnings.catch_warnings():
            # Python 2's string opcodes may hold odd escapes, which are no news here.
            warnings.simplefilter("ignore")
            return _Machine(load_storage, swap_bytes).run(stream)
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(_damaged(error)) from error


def _damaged(error):
    return f"its pickle is damaged or not of torch's making ({error})"


def _opcodes(stream):
    try:
        yield from pickletools.genops(stream)
    except ValueError as error:  # raised here by genops alone
        raise ValueError(_damaged(error)) from error


_LITERALS = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}


class _Machine:
    """The pickle machine: a stack, the stacks below each mark, and the memo."""

    def __init__(self, load_storage, swap_bytes):
        self.load_storage = load_storage
        self.swap_bytes = swap_bytes
        self.stack, self.below, self.memo = [], [], {}

    def run(self, stream):
        for opcode, argument, _ in _opcodes(stream):
            name = opcode.name
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                self.memo[argument] = self.stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[argument])
            elif name == "STOP":
                return self.stack.pop()
            elif name not in ("PROTO", "FRAME"):
                handler = getattr(self, f"op_{name}", None)
                if handler is None:
                    raise TypeError(f"it uses the opcode {name}")
                handler(argument)
        raise TypeError("it has no end mark")

    def pop_mark(self):
        items, self.stack = self.stack, self.below.pop()
        return items

    # Each method below is one opcode, under its name in ``pickletools``.

    def op_MARK(self, _):
        self.below.append(self.stack)
        self.stack = []

    def op_POP(self, _):
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def op_POP_MARK(self, _):
        self.pop_mark()

    def op_DUP(self, _):
        self.stack.append(self.stack[-1])

    def op_MEMOIZE(self, _):
        self.memo[len(self.memo)] = self.stack[-1]

    def op_TUPLE(self, _):
        items = tuple(self.pop_mark())
        self.stack.append(items)

    def op_TUPLE1(self, _):
        self.stack.append((self.stack.pop(),))

    def op_TUPLE2(self, _):
        second, first = self.stack.pop(), self.stack.pop()
        self.stack.append((first, second))

    def op_TUPLE3(self, _):
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append((first, second, third))

    def op_LIST(self, _):
        items = self.pop_mark()
        self.stack.append(items)

    def op_DICT(self, _):
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def op_FROZENSET(self, _):
        items = self.pop_mark()
        self.stack.append(frozenset(map(checked_key, items)))

    def op_APPEND(self, _):
        item = self.stack.pop()
        self.append_items([item])

    def op_APPENDS(self, _):
        self.append_items(self.pop_mark())

    def op_SETITEM(self, _):
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def op_SETITEMS(self, _):
        self.set_items(self.pop_mark())

    def op_ADDITEMS(self, _):
        items = self.pop_mark()
        if not isinstance(self.stack[-1], set):
            raise TypeError("items are added to something that is no set")
        self.stack[-1].update(map(checked_key, items))

    def op_GLOBAL(self, argument):
        module, _, name = argument.partition(" ")
        self.push_global(module, name)

    def op_STACK_GLOBAL(self, _):
        name, module = self.stack.pop(), self.stack.pop()
        self.push_global(module, name)

    def op_BINPERSID(self, _):
        identity = self.stack.pop()
        if not isinstance(identity, tuple):
            raise TypeError("the id of a storage must be a tuple")
        self.stack.append(self.load_storage(identity))

    def op_REDUCE(self, _):
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.stack.append(build_call(kind, arguments, self.swap_bytes))

    def op_NEWOBJ(self, _):
        self.op_REDUCE(None)

    def op_NEWOBJ_EX(self, _):
        keywords, arguments = self.stack.pop(), self.stack.pop()
        self.stack[-1] = TorchRecord(
            checked_global(self.stack[-1]), (*arguments, keywords)
        )

    def op_BUILD(self, _):
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, TorchRecord):
            target.state = state
        elif not isinstance(target, dict):
            raise TypeError(f"attributes are set on a {type(target).__name__}")
        # On a dict: torch sets the attribute ``_metadata``, version numbers of its
        # modules. A plain state dict has no use for them.

    def push_global(self, module, name):
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a global's module and name must be strings")
        found = TorchGlobal(module, name)
        self.stack.append(TORCH_DTYPES.get(found, found))

    def append_items(self, items):
        target = self.stack[-1]
        if not isinstance(target, (list, TorchRecord)):
            raise TypeError(f"items are appended to a {type(target).__name__}")
        (target.items if isinstance(target, TorchRecord) else target).extend(items)

    def set_items(self, items):
        target = self.stack[-1]
        if len(items) % 2:
            raise TypeError("a key has no value")
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, TorchRecord):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update((checked_key(key), value) for key, value in pairs)
        else:
            raise TypeError(f"items are set in a {type(target).__name__}")
