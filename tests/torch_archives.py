"""Archives like torch's, made by hand for the tests of the reader."""

import io
import zipfile

import numpy as np

STORAGE = b"X\x07\x00\x00\x00storage"


def archive(pickled: bytes, storages=(), compression=zipfile.ZIP_STORED, **entries):
    """The bytes of an archive with this ``data.pkl``, arrays and other entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for name, data in {"byteorder": b"little", **entries}.items():
            file.writestr(f"archive/{name}", data)
        for key, array in enumerate(storages):
            file.writestr(f"archive/data/{key}", np.asarray(array).tobytes())
    return out.getvalue()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def integers(values) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(count: int, kind: bytes = b"ctorch\nFloatStorage\n", key="0") -> bytes:
    return (
        b"(" + text("storage") + kind + text(key) + text("cpu") + integer(count) + b"tQ"
    )


def tensor(offset, size, stride, count=6, kind=b"ctorch\nFloatStorage\n") -> bytes:
    """The opcodes of one tensor in the storage 0, with ``count`` numbers."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage(count, kind)
        + integer(offset)
        + integers(size)
        + integers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )
