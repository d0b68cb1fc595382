"""Runs the Metal shaders of a program on the CPU, behind IREE's own host program.

The host program is compiled on for IREE's ``local`` device, with a small library in the
place of each shader, which leads to the shader's text compiled as C++. So buffers,
offsets, constants, threadgroup counts and the order of dispatches are those that a Mac
would see.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from metal.iree_metal import BINARY, Kernel, MetalProgram
from metal.shader_cpp import PROLOGUE, symbol, translate

from models.export import load_module, run_compiler

STAND_IN = Path(__file__).parent / "stand_in"
# Metal has no double: every literal is a float. Nothing is fused that is not `fma`.
CXX_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fsingle-precision-constant")
CXX_FLAGS += ("-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
CXX_FLAGS += ("-Wno-attributes", "-Wno-narrowing")
LINK_FLAGS = ("-shared", "-fvisibility=default", "-s")
HOST_FLAGS = (
    "--compile-from=hal",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
)


class ShaderRunner:
    """Builds and runs shaders in a folder; a shader seen before is not built again.

    ``source`` of kernels may be changed beforehand, to see that it is found out.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._built: dict[str, tuple[Path, int]] = {}  # library, and number in it
        self._threads = folder / "libthreads.so"
        _compile_cpp(STAND_IN / "threads.cpp", self._threads, "-O2")
        self._reverse = ctypes.c_int.in_dll(
            ctypes.CDLL(str(self._threads), ctypes.RTLD_GLOBAL),
            "_ZN8stand_in7reverseE",
        )
        stub = folder / "stub.so"
        _compile_cpp(STAND_IN / "stub.cpp", stub, "-Wl,-z,noseparate-code")
        self._stub = stub.read_bytes()

    def build(self, program: MetalProgram) -> "Module":
        """The program with its shaders in place, ready to run."""
        places = self._build_kernels(program.kernels)
        stubs = {
            kernel.executable: self._stub_of(kernel.entry, *places[kernel.executable])
            for kernel in program.kernels
        }
        number = len(list(self.folder.glob("*.vmfb")))
        output = self.folder / f"program_{number}.vmfb"
        run_compiler(_for_local_device(program.host, stubs), output, *HOST_FLAGS)
        return Module(output, self._reverse)

    def _build_kernels(self, kernels: Sequence[Kernel]) -> dict[str, tuple[Path, int]]:
        places, texts = {}, [PROLOGUE]
        library = self.folder / f"kernels_{len(self._built)}.so"
        for kernel in kernels:
            key = _key(kernel)
            if key not in self._built:
                self._built[key] = (library, len(self._built))
                texts.append(translate(kernel, self._built[key][1]))
            places[kernel.executable] = self._built[key]
        if len(texts) > 1:
            source = library.with_suffix(".cpp")
            source.write_text("".join(texts))
            _compile_cpp(source, library, str(self._threads))
        return places

    def _stub_of(self, entry: str, library: Path, number: int) -> bytes:
        stub = self._stub
        for placeholder, name in (
            (b"LIBRARY", str(library)),
            (b"SYMBOL", symbol(number)),
            (b"ENTRY", entry),
        ):
            # The placeholder is followed by the zeros of its array.
            size = len(name.encode()) + 1
            if stub.count(placeholder + bytes(size)) != 1:
                raise ValueError("the stub has another layout")
            at = stub.index(placeholder + bytes(size))
            stub = stub[:at] + name.encode() + b"\0" + stub[at + size :]
        return stub


class Module:
    """A program with its shaders, which can be called."""

    def __init__(self, path: Path, reverse: ctypes.c_int):
        self._main = load_module(path, "local-sync")
        self._reverse = reverse

    def __call__(
        self, arguments: Sequence[np.ndarray], reverse: bool = False
    ) -> list[np.ndarray]:
        """Results of ``main``; ``reverse`` turns the order of the threads round.

        Constants are worked out once, when the module is loaded, forward.
        """
        self._reverse.value = reverse
        try:
            return self._main(*arguments)
        finally:
            self._reverse.value = 0


def _key(kernel: Kernel) -> str:
    """Of kernels that do the same; the name says where the kernel came from."""
    text = kernel.source.replace(kernel.entry, "entry") + str(kernel.threads)
    return hashlib.sha256(text.encode()).hexdigest()


def _compile_cpp(source: Path, output: Path, *more: str) -> None:
    command = ["g++", *CXX_FLAGS, f"-I{STAND_IN}", *LINK_FLAGS, str(source), *more]
    result = subprocess.run(
        [*command, "-o", str(output)], capture_output=True, text=True
    )
    if result.returncode:
        raise ValueError(f"g++ refuses {source}:\n{result.stderr[:4000]}")


def _for_local_device(host: str, stubs: dict[str, bytes]) -> str:
    """The host program with libraries for shaders, looking for a CPU device."""

    def library(match) -> str:
        data = stubs[match[1]]
        return (
            f"hal.executable private @{match[1]} {{\n"
            f"hal.executable.binary public @{match[2]} <format = "
            f'"system-elf-x86_64", data = dense<"0x{data.hex().upper()}"> : '
            f"vector<{len(data)}xi8>>"
        )

    host = BINARY.sub(library, host)
    for metal, local in (
        ('key("hal.device.id" :: "metal")', 'key("hal.device.id" :: "local*")'),
        ('"hal.executable.format" :: "metal-msl-fb"',)
        + ('"hal.executable.format" :: "system-elf-x86_64"',),
    ):
        if metal not in host:
            raise ValueError(f"the host program never asks for {metal}")
        host = host.replace(metal, local)
    return host
