"""What torch's pickles name, and the closed list of what becomes of it.

A global in a pickle is a pair of names, and stays one (``TorchGlobal``). A call gives
something only where this file says how to build it: tensors as numpy arrays,
``OrderedDict``, ``torch.Size``, sets, bytes. Every other call becomes an inert
``TorchRecord``. Nothing is imported or called by a name out of a file.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class TorchGlobal:
    """A function or class that a pickle names: two strings, never imported.

    Attributes:
        module, name: as the file has them, e.g. ``("torch._C._nn", "gelu")``.
    """

    module: str
    name: str

    def __str__(self):
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class TorchRecord:
    """What a pickle wanted to call or to make an instance of, kept as data.

    Attributes:
        kind: the function or class that was named.
        arguments: the positional arguments that it was to be given.
        state: what was to be put into the instance (mostly its attributes), or None.
        items: what was to be appended to it, or the pairs that were to be set in it.
    """

    kind: TorchGlobal
    arguments: tuple = ()
    state: Any = None
    items: list = field(default_factory=list)

    def __repr__(self):  # short: a state may be large, or contain the record itself
        return f"TorchRecord({self.kind})"


TYPED_STORAGES = {
    TorchGlobal("torch", f"{name}Storage"): np.dtype(dtype)
    for name, dtype in {
        "Float": np.float32,
        "Double": np.float64,
        "Half": np.float16,
        "BFloat16": ml_dtypes.bfloat16,
        "Char": np.int8,
        "Byte": np.uint8,
        "Short": np.int16,
        "Int": np.int32,
        "Long": np.int64,
        "Bool": np.bool_,
        "ComplexFloat": np.complex64,
        "ComplexDouble": np.complex128,
    }.items()
}
UNTYPED_STORAGE = TorchGlobal("torch.storage", "UntypedStorage")
TORCH_DTYPES = {
    TorchGlobal("torch", name): np.dtype(getattr(ml_dtypes, name, name))
    for name in [
        "float16",
        "float32",
        "float64",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ]
}


_KEYS = (str, bytes, int, float, complex, type(None), TorchGlobal, np.dtype)


def checked_key(key):
    """A dict's key or set's item: flat, as the hash of nested tuples may never end."""
    if isinstance(key, _KEYS):
        return key
    if isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key):
        return key
    raise TypeError(f"a {type(key).__name__} is used as a key")


def checked_global(kind) -> TorchGlobal:
    if not isinstance(kind, TorchGlobal):
        raise TypeError(f"a {type(kind).__name__} is called, which is no global")
    return kind


def build_call(kind, arguments, swap_bytes):
    """What a call gives: the few kinds in the closed list below, or an inert record."""
    if not isinstance(arguments, tuple):
        raise TypeError("the arguments of a call must be a tuple")
    if checked_global(kind) == TorchGlobal("torch._utils", "_rebuild_tensor_v3"):
        return _tensor_v3(*arguments, swap_bytes=swap_bytes)
    if kind == TorchGlobal("torch._tensor", "_rebuild_from_type_v2"):
        # A tensor with Python attributes: (function, class, arguments, attributes).
        if len(arguments) != 4:
            raise TypeError("a tensor with attributes needs four arguments")
        function, tensor_class, inner, _ = arguments
        names = checked_global(function), checked_global(tensor_class)
        if names[0] in _TENSOR_FUNCTIONS and names[1] in _TENSOR_CLASSES:
            return build_call(function, inner, swap_bytes)
    if kind in _BUILDERS:
        return _BUILDERS[kind](*arguments)
    return TorchRecord(kind, arguments)


def _strided(storage, offset, size, stride, dtype=None):
    """The view of ``storage`` that a tensor is, after a check that it lies inside."""
    # No message shows a value of unknown type: its text may be endless.
    if not (
        isinstance(storage, np.ndarray)
        and storage.ndim == 1
        and storage.flags.c_contiguous
    ):
        raise TypeError("a tensor must lie in a storage")
    dtype = storage.dtype if dtype is None else dtype
    if not (isinstance(size, (tuple, list)) and isinstance(stride, (tuple, list))):
        raise TypeError("the size and the stride of a tensor must be tuples")
    if not all(type(number) is int for number in (offset, *size, *stride)):
        raise TypeError("the offset, size and stride of a tensor must be integers")
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise ValueError(f"impossible tensor: {offset=}, {size=}, {stride=}")
    if 0 in size:
        return np.empty(size, dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    available = storage.nbytes // dtype.itemsize
    if last >= available:
        raise ValueError(
            f"a tensor reaches outside its storage: {offset=}, {size=}, {stride=}, "
            f"but the storage holds {available} numbers"
        )
    return np.ndarray(
        size,
        dtype,
        buffer=storage.view(np.uint8),
        offset=offset * dtype.itemsize,
        strides=tuple(step * dtype.itemsize for step in stride),
    )


def _resolved(tensor, metadata):
    """``tensor`` after torch's lazy conjugation and negation, kept as two flags."""
    flags = {} if metadata is None else metadata
    if not isinstance(flags, dict) or not set(flags) <= {"conj", "neg"}:
        raise TypeError("a tensor has flags other than conj and neg")
    if flags:
        _check_copy(tensor)
    tensor = np.conj(tensor) if flags.get("conj") is True else tensor
    return np.negative(tensor) if flags.get("neg") is True else tensor


def _check_copy(tensor):
    """Refuses to copy a view that is larger than what it views (a stride of zero)."""
    if tensor.base is not None and tensor.nbytes > tensor.base.nbytes:
        raise ValueError(f"a repeated tensor of {tensor.nbytes} bytes must be copied")


def _tensor(storage, offset, size, stride):
    return _strided(storage, offset, size, stride)


def _tensor_v2(storage, offset, size, stride, _requires_grad, _hooks, metadata=None):
    return _resolved(_strided(storage, offset, size, stride), metadata)


def _tensor_v3(
    storage, offset, size, stride, _grad, _hooks, dtype, metadata=None, *, swap_bytes
):
    if not isinstance(dtype, np.dtype):
        known = dtype if isinstance(dtype, TorchGlobal) else type(dtype).__name__
        raise ValueError(f"tensors of the type {known} have no numpy form")
    tensor = _strided(storage, offset, size, stride, dtype)
    if swap_bytes and dtype.itemsize > 1:
        _check_copy(tensor)
        tensor = tensor.view(f"u{dtype.itemsize}").byteswap().view(dtype)
    return _resolved(tensor, metadata)


def _parameter(tensor, *_):
    if not isinstance(tensor, np.ndarray):
        raise TypeError("a parameter must be a tensor")
    return tensor


def _items(items):
    if not isinstance(items, (tuple, list)):  # e.g. no tensor, which may be endless
        raise TypeError(f"items are taken from a {type(items).__name__}")
    return items


def _size(items=()):
    return tuple(_items(items))


def _ordered_dict(pairs=()):
    return OrderedDict((checked_key(key), value) for key, value in _items(pairs))


def _set(items=()):
    return set(map(checked_key, _items(items)))


def _frozenset(items=()):
    return frozenset(_set(items))


def _complex(real, imag):
    if not (isinstance(real, float) and isinstance(imag, float)):
        raise TypeError("the parts of a complex number must be floats")
    return complex(real, imag)


def _encoded(text, encoding):
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("bytes must be stored as text in latin1")
    return text.encode("latin1")


_TENSOR_CLASSES = (
    TorchGlobal("torch", "Tensor"),
    TorchGlobal("torch.nn.parameter", "Parameter"),
)
_TENSOR_FUNCTIONS = tuple(
    TorchGlobal("torch._utils", f"_rebuild_tensor{version}")
    for version in ("", "_v2", "_v3")
)
_BUILDERS = {
    TorchGlobal("torch._utils", "_rebuild_tensor"): _tensor,
    TorchGlobal("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    TorchGlobal("torch._utils", "_rebuild_parameter"): _parameter,
    TorchGlobal("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    TorchGlobal("torch", "Size"): _size,
    TorchGlobal("collections", "OrderedDict"): _ordered_dict,
    TorchGlobal("_codecs", "encode"): _encoded,
    **{
        TorchGlobal(module, name): build
        for module in ("__builtin__", "builtins")
        for name, build in {
            "set": _set,
            "frozenset": _frozenset,
            "complex": _complex,
        }.items()
    },
}
