"""Programs through IREE's compiler to Metal: the host's part, and the shaders' text.

One run of the compiler up to ``hal`` gives both: MLIR that still says what the host
does, and inside it, for each kernel, the file that IREE's runtime would hand to Metal
on a Mac, with the Metal Shading Language text and the size of the threadgroups.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

from models.export import IREE_VERSION, compile_program

BINARY = re.compile(
    r"hal\.executable private @(\w+) \{\s*hal\.executable\.binary public @(\w+) "
    r'<format = "metal-msl-fb", data = dense<"0x([0-9A-F]+)"> : vector<\d+xi8>, '
    r'mime_type = "application/x-flatbuffers">'
)


class Kernel(NamedTuple):
    """A compute shader.

    Attributes:
        executable: its name in the host program.
        entry: the name of its function.
        threads: of a threadgroup, (x, y, z).
        source: Metal Shading Language.
    """

    executable: str
    entry: str
    threads: tuple[int, int, int]
    source: str


class MetalProgram(NamedTuple):
    """A compiled program: the host's MLIR, and its kernels by executable."""

    host: str
    kernels: tuple[Kernel, ...]


def compile_to_metal(stablehlo: str, folder: Path) -> MetalProgram:
    """
    Raises:
        ExportError: where IREE has no Metal kernel for something in the program.
    """
    output = folder / "host.mlir"
    compile_program(stablehlo, "metal", output, "--compile-to=hal")
    host = output.read_text()
    kernels = []
    for match in BINARY.finditer(host):
        entry, threads, source = read_metal_file(bytes.fromhex(match[3]))
        kernels.append(Kernel(match[1], entry, threads, source))
    if len(kernels) != host.count("hal.executable.binary "):
        raise ValueError("an executable that is not a Metal file with one kernel")
    return MetalProgram(host, tuple(kernels))


def read_metal_file(data: bytes) -> tuple[str, tuple[int, int, int], str]:
    """Entry point, threads of a threadgroup and source of IREE's ``metal-msl-fb``.

    It is a FlatBuffer behind 64 bytes: tables whose first word leads to a list of where
    in the table each field is.
    """
    if data[:4] != b"MTL1" or data[68:72] != b"MTL1":
        raise ValueError("not the Metal file of IREE " + IREE_VERSION)

    def word(at: int) -> int:
        return struct.unpack_from("<I", data, at)[0]

    def follow(at: int) -> int:
        return at + word(at)

    def field(table: int, index: int) -> int:
        fields = table - struct.unpack_from("<i", data, table)[0]
        return table + struct.unpack_from("<H", data, fields + 4 + 2 * index)[0]

    def text(at: int) -> str:
        start = follow(at)
        return data[start + 4 : start + 4 + word(start)].decode()

    def only(at: int) -> int:
        vector = follow(at)
        if word(vector) != 1:
            raise ValueError(f"{word(vector)} kernels or libraries in a file, not one")
        return follow(vector + 4)

    root = follow(64)
    pipeline, library = only(field(root, 0)), only(field(root, 1))
    entry = text(field(pipeline, 1))
    threads = struct.unpack_from("<3I", data, field(pipeline, 3))
    source = text(field(follow(field(library, 0)), 1))
    if f"kernel void {entry}(" not in source or not 1 <= threads[0] <= 1024:
        raise ValueError("not the Metal file of IREE " + IREE_VERSION)
    return entry, threads, source
