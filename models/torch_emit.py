"""The pickle of plain data and arrays as torch writes it, emitted without torch."""

import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.torch_objects import (
    TORCH_DTYPES,
    TYPED_STORAGES,
    UNTYPED_STORAGE,
    TorchGlobal,
)

_STORAGES = {dtype: storage for storage, dtype in TYPED_STORAGES.items()}
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ORDERED_DICT = TorchGlobal("collections", "OrderedDict")


def dump_pickle(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """The pickle (protocol 2) of ``value``, and the storages that it refers to.

    Returns:
        The pickle's bytes, and contiguous little-endian arrays, the storage with the
        key ``str(i)`` at place i.

    Raises:
        ValueError: names what in ``value`` torch can't hold, and where it is.
    """
    emitter = _Emitter()
    try:
        emitter.emit(value, "the object")
    except RecursionError as error:
        raise ValueError("the object is nested too deeply to be written") from error
    return b"\x80\x02" + bytes(emitter.out) + b".", emitter.storages


class _Emitter:
    def __init__(self):
        self.out = bytearray()
        self.storages, self.keys = [], {}  # keys: id of an array -> (key, the array)
        self.open = set()  # ids of the containers around the present value

    def emit(self, value, where):
        if value is None:
            self.out += b"N"
        elif isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self.emit_integer(value, where)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self.emit_text(value)
        elif isinstance(value, TorchGlobal):
            self.emit_global(value)
        elif isinstance(value, np.dtype) and value in _DTYPES:
            self.emit_global(_DTYPES[value])
        elif isinstance(value, np.generic) and value.dtype.kind in "biuf":
            self.emit(value.item(), where)
        elif isinstance(value, (dict, Mapping, list, tuple)):
            self.emit_container(value, where)
        elif hasattr(value, "__array__"):
            self.emit_tensor(value, where)
        else:
            raise ValueError(
                f"{where} is of the type {type(value).__name__}, which can't be "
                "written: use arrays, numbers, strings, None, dicts, lists, tuples or "
                "TorchGlobal"
            )

    def emit_integer(self, value, where):
        if -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
            return
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise ValueError(
                f"{where} is an integer of {len(raw)} bytes; the most is 255"
            )
        self.out += b"\x8a" + bytes([len(raw)]) + raw

    def emit_text(self, value):
        raw = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(raw)) + raw

    def emit_global(self, value):
        for part in (value.module, value.name):
            if not all(word.isidentifier() for word in part.split(".")):
                raise ValueError(f"{value!r} must hold dotted names")
        self.out += f"c{value.module}\n{value.name}\n".encode()

    def emit_container(self, value, where):
        if id(value) in self.open:
            raise ValueError(f"{where} contains itself, so that it can't be written")
        self.open.add(id(value))
        if isinstance(value, Mapping):
            if isinstance(value, OrderedDict):
                self.emit_global(_ORDERED_DICT)
                self.out += b")R"
            else:
                self.out += b"}"
            self.out += b"("
            for key, item in value.items():
                self.emit(key, f"a key of {where}")
                self.emit(item, f"{where}[{key!r}]")
            self.out += b"u"
        else:
            self.out += b"(" if isinstance(value, tuple) else b"]("
            for index, item in enumerate(value):
                self.emit(item, f"{where}[{index}]")
            self.out += b"t" if isinstance(value, tuple) else b"e"
        self.open.remove(id(value))

    def emit_tensor(self, value, where):
        array = np.asarray(value)
        native = array.dtype.newbyteorder("=")
        if native not in _DTYPES:
            raise ValueError(
                f"{where} is an array of {array.dtype}, which is no type of torch's: "
                "convert it first, e.g. with .astype('float32')"
            )
        if id(value) not in self.keys:
            self.keys[id(value)] = (len(self.storages), value)
            little = native.newbyteorder("<")
            self.storages.append(np.ascontiguousarray(array, little))
        key, _ = self.keys[id(value)]
        typed = native in _STORAGES
        strides = [1]
        for length in reversed(array.shape[1:]):
            strides.insert(0, strides[0] * max(length, 1))
        version = "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
        self.emit_global(TorchGlobal("torch._utils", version))
        self.out += b"(("
        self.emit_text("storage")
        self.emit_global(_STORAGES[native] if typed else UNTYPED_STORAGE)
        self.emit_text(str(key))
        self.emit_text("cpu")
        self.emit_integer(array.size if typed else array.nbytes, where)
        self.out += b"tQ"
        self.emit_integer(0, where)
        self.emit(tuple(array.shape), where)
        self.emit(tuple(strides[: array.ndim]), where)
        self.out += b"\x89"
        self.emit(OrderedDict(), where)
        if not typed:
            self.emit_global(_DTYPES[native])
        self.out += b"tR"
