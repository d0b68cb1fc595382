"""Choosing the device before the first array, and the way to it for host arrays.

`select_backend` is called once, at the start of a program. A plugin that is chosen in
code starts with JAX's first array, so the choice, and what the plugin reads from the
environment, must come before it.
"""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import clear_backends

from jaxops import host_memory, plugins
from jaxops.transfer import to_device

__all__ = ["NAMES", "Backend", "BackendError", "select_backend", "to_device"]

NAMES = ("auto", "cpu", "gpu", "metal")


class BackendError(RuntimeError):
    """The backend asked for cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class Backend:
    """The device that arrays go to by default; `str()` describes it in one line.

    Attributes:
        name: "cpu", "gpu", "metal", or JAX's platform name if it is none of these.
        platform: JAX's name for it, as in `jax.devices(platform)`.
        device_kind: what the device calls itself.
        device_count: number of such devices.
        plugin: distribution and version of the Apple plugin, or "".
        notes: why this one, and what to mind.
    """

    name: str
    platform: str
    device_kind: str
    device_count: int
    plugin: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = f"{self.device_count} x " if self.device_count > 1 else ""
        source = f"{self.plugin}, " if self.plugin else ""
        kind = "" if self.device_kind == self.name else f" {count}{self.device_kind}"
        line = f"{self.name}{kind} ({source}jax {jax.__version__})"
        return "; ".join((line, *self.notes))


@dataclass(frozen=True)
class _Candidate:
    name: str
    platform: str
    plugin: plugins.Plugin | None = None
    notes: tuple[str, ...] = ()


TRITON = "xla_gpu_enable_triton_gemm"  # an option of XLA since before jax 0.4.34
LLVM = "xla_backend_extra_options"  # of XLA, for options of LLVM
LLVM_KNOWN_IN = (0, 10), (0, 13)  # jax from, below: LLVM ends a process for an unknown

# What this module wrote to `jax_platforms`, and what the user had there before; and the
# backend that runs since. A process has one backend, so this is the process's state.
_wrote: tuple[str, str | None] | None = None
_running: Backend | None = None


def set_defaults() -> None:
    """Make one seed give one set of weights, and float32 products float32, everywhere.

    `jaxops` calls this when it is imported. The bits of `jax.random` are then the same
    on every jax from 0.4.34 on and on every device. Floats made from them agree to one
    unit in the last place between jax versions on the CPU; a GPU's own logarithm and
    error function move normal numbers by up to 4e-6.
    """
    jax.config.update("jax_threefry_partitionable", True)  # the default since jax 0.5
    jax.config.update("jax_default_prng_impl", "threefry2x32")
    if not _has_started():
        # MLX multiplies float32 at TF32-class precision on an M5 unless told otherwise
        # before its first operation: a truncated DFT then errs by 4e-4, not 4e-7.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")


def select_backend(name: str = "auto") -> Backend:
    """Choose the device that arrays go to. Call it before the first array.

    "metal" is an Apple GPU, "gpu" is CUDA or ROCm, "auto" is the best that works, or
    the CPU. `JAX_PLATFORMS`, where the user has set it, limits the choice and decides
    between two plugins. The CPU stays reachable as `jax.devices("cpu")`. On Linux,
    freed host memory is kept for the next call (see `jaxops.host_memory`). On an NVIDIA
    GPU, `XLA_FLAGS` gets two options (see `nvidia_flags`).

    Args:
        name: one of "auto", "cpu", "gpu", "metal".

    Returns:
        A description of what was chosen; `str()` of it is one line for people.

    Raises:
        ValueError: for another name.
        BackendError: if what was asked for cannot be had: no plugin, a plugin that does
            not fit this jax, not a Mac, JAX already running on something else, a
            plugin that does not start. JAX is left as it was. "auto" raises it only
            where the user's `JAX_PLATFORMS` leaves no way out.
    """
    global _running
    if name not in NAMES:
        raise ValueError(f"a backend is one of {', '.join(NAMES)}; got {name!r}")
    listed = _user_platforms()
    if _has_started():
        return _already_running(name, listed)
    host_memory.keep_freed_memory()
    if name == "auto":
        _running = _start_first(_order(listed), listed)
    else:
        _require_listed(name, listed)
        _running = _start_first((name,), listed)
    return _running


def _has_started() -> bool:
    # JAX has no public way to ask; this one has been there since before 0.4.34.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _already_running(name: str, listed: tuple[str, ...]) -> Backend:
    running = _running or _describe_running()
    if name in ("auto", running.name):
        return running
    # A cause that a fresh process would not cure is told first.
    _require_listed(name, listed)
    _find(name, listed)
    why = (
        "an earlier select_backend chose it"
        if _running
        else "an array was made or the devices were listed before"
    )
    raise BackendError(
        f"select_backend({name!r}) came too late: JAX already runs on "
        f"{running.platform}, because {why}. Call it first, in a fresh process."
    )


def _describe_running() -> Backend:
    devices = jax.devices()
    platform = devices[0].platform
    notes = ("JAX had chosen it before select_backend",)
    return _describe(_Candidate(_name_of(platform), platform, None, notes), devices)


def _name_of(platform: str) -> str:
    if platform in plugins.APPLE_PLATFORMS:
        return "metal"
    return "gpu" if platform in ("gpu", *plugins.GPU_PLUGINS) else platform


def _user_platforms() -> tuple[str, ...]:
    """The platforms that the user lists, in order; empty if JAX is free to choose."""
    value = jax.config.jax_platforms
    if _wrote is not None and value == _wrote[0]:
        value = _wrote[1]
    value = value or os.environ.get("JAX_PLATFORM_NAME", "")
    listed: list[str] = []
    for platform in filter(None, (part.strip() for part in value.split(","))):
        listed.extend(plugins.GPU_PLUGINS if platform == "gpu" else (platform,))
    return tuple(listed)


def _listed_as(listed: tuple[str, ...]) -> str:
    return f"JAX_PLATFORMS={','.join(listed)}"


def _require_listed(name: str, listed: tuple[str, ...]) -> None:
    if listed and name not in map(_name_of, listed):
        raise BackendError(
            f"{name} was asked for, but {_listed_as(listed)} is set and leaves it out; "
            f"unset JAX_PLATFORMS, or ask for --backend {_name_of(listed[0])}"
        )


def _order(listed: tuple[str, ...]) -> tuple[str, ...]:
    """What "auto" tries: the user's list, or Metal on a Mac, or JAX's own choice."""
    if listed:
        return tuple(dict.fromkeys(map(_name_of, listed)))
    return ("metal", "cpu") if plugins.read_host().system == "Darwin" else ("", "cpu")


def _find(name: str, listed: tuple[str, ...]) -> list[_Candidate]:
    if name == "metal":
        return _find_metal(listed)
    if name == "gpu":
        return _find_gpu(listed)
    return [_Candidate(name, name)]


def _find_gpu(listed: tuple[str, ...]) -> list[_Candidate]:
    """CUDA, ROCm, or both, as installed; CUDA if no distribution tells."""
    if plugins.read_host().system == "Darwin":
        raise BackendError(
            "gpu means CUDA or ROCm, and macOS has neither; use --backend metal"
        )
    platforms = [p for p in listed or plugins.GPU_PLUGINS if _name_of(p) == "gpu"]
    installed = [p for p in platforms if plugins.gpu_distribution(p)]
    return [_Candidate("gpu", p) for p in installed or platforms[:1]]


def _find_metal(listed: tuple[str, ...]) -> list[_Candidate]:
    """Every installed Apple plugin that fits, the best first; BackendError if none."""
    host = plugins.read_host()
    if obstacle := plugins.host_obstacle(host):
        raise BackendError(obstacle)
    if jax.config.jax_enable_x64:
        raise BackendError(
            "no Apple GPU has float64, and jax_enable_x64 is on; unset JAX_ENABLE_X64, "
            "or use --backend cpu"
        )
    installed = [
        plugin
        for plugin in plugins.APPLE_PLUGINS
        if plugins.installed_version(plugin.distribution)
        and (not listed or plugin.platform in listed)
    ]
    if listed:
        installed.sort(key=lambda plugin: listed.index(plugin.platform))
    if not installed and listed:  # perhaps a plugin that the table does not know
        return [_Candidate("metal", p) for p in listed if _name_of(p) == "metal"]
    if not installed:
        raise BackendError(
            f"no Metal plugin is installed; run: {plugins.install_command(host)}"
        )
    _refuse_clash(installed)
    misfits = {plugin: plugins.misfit(plugin, host) for plugin in installed}
    fitting = [plugin for plugin in installed if misfits[plugin] is None]
    if not fitting:
        raise BackendError("; ".join(filter(None, misfits.values())))
    return [_metal_candidate(plugin, installed, listed) for plugin in fitting]


def _refuse_clash(installed: list[plugins.Plugin]) -> None:
    for first in installed:
        for second in installed[installed.index(first) + 1 :]:
            if first.platform == second.platform:
                raise BackendError(
                    f"{plugins.label(first)} and {plugins.label(second)} both register "
                    f"the platform {first.platform!r}, and JAX takes either; "
                    f"run: pip uninstall {second.distribution}"
                )


def _metal_candidate(
    plugin: plugins.Plugin, installed: list[plugins.Plugin], listed: tuple[str, ...]
) -> _Candidate:
    notes = []
    for other in installed:
        if other is plugin:
            continue
        why = "JAX_PLATFORMS lists it first" if listed else "it is preferred"
        misfit = plugins.misfit(other, plugins.read_host())
        if misfit:
            notes.append(f"not {plugins.label(other)}: {misfit}")
        else:
            notes.append(
                f"{plugin.distribution} rather than {plugins.label(other)}, because "
                f"{why} (JAX_PLATFORMS={other.platform},cpu takes the other)"
            )
    if plugin.uses_mlx and os.environ.get("MLX_ENABLE_TF32") != "0":
        notes.append(
            "MLX_ENABLE_TF32 is not 0: float32 products may be as coarse as 1e-3"
        )
    return _Candidate("metal", plugin.platform, plugin, tuple(notes))


def _start_first(names: tuple[str, ...], listed: tuple[str, ...]) -> Backend:
    """The first that starts; what kept the ones before it from it becomes its notes."""
    reasons: list[str] = []
    for name in names:
        try:
            candidates = _find(name, listed)
        except BackendError as error:
            reasons.append(str(error))
            continue
        for candidate in candidates:
            try:
                return _start(candidate, tuple(reasons))
            except BackendError as error:
                reasons.append(str(error))
    raise BackendError("; ".join(reasons))


def _start(candidate: _Candidate, reasons: tuple[str, ...]) -> Backend:
    """Start JAX on it and compute one number; leave JAX as it was if that fails."""
    global _wrote
    before = jax.config.jax_platforms
    users = _wrote[1] if _wrote is not None and before == _wrote[0] else before
    if candidate.platform:
        # Without "cpu" in the list JAX has no CPU device left to fall back to.
        value = ",".join(dict.fromkeys((candidate.platform, "cpu")))
        _wrote = (value, users)
        jax.config.update("jax_platforms", value)
    if candidate.plugin is not None and candidate.plugin.distribution == "jax-metal":
        # jax-metal refuses each jax but one by version alone, some of which it can run.
        os.environ.setdefault("ENABLE_PJRT_COMPATIBILITY", "1")
    if candidate.platform == "cuda":
        os.environ["XLA_FLAGS"] = nvidia_flags(os.environ.get("XLA_FLAGS", ""))
    try:
        devices = jax.devices(candidate.platform or None)
        _check_default(jax.devices(), devices)
        _check_result(devices[0])
    except Exception as error:  # a plugin may raise anything; all of it is passed on
        clear_backends()
        jax.config.update("jax_platforms", before)
        raise BackendError(_start_failure(candidate, error)) from error
    return _describe(candidate, devices, reasons)


def nvidia_flags(flags: str) -> str:
    """XLA_FLAGS for an NVIDIA GPU, each unless the user chose.

    Matrix products by cuBLAS: XLA else tries many Triton kernels for each. A training
    step of an FNO, 64 channels on 128x128 points, took 114 s to compile with them on an
    H200, and 10 s without; the step was then 6.7 ms.

    A product and a sum in one instruction, as nvcc and PyTorch have it: LLVM makes two
    of them in the jax versions named here. gelu takes 121 instructions in place of 163,
    a step in bfloat16 0.97 of the time.
    """
    if TRITON not in flags:
        flags += f" --{TRITON}=false"
    first, beyond = LLVM_KNOWN_IN
    if LLVM not in flags and first <= jax.__version_info__[:2] < beyond:
        flags += f" --{LLVM}=-nvptx-fma-level=2"
    return flags.strip()


def _check_default(default: list[jax.Device], wanted: list[jax.Device]) -> None:
    if default[0].client is not wanted[0].client:
        raise RuntimeError(f"JAX's default device stays {default[0]}")


def _check_result(device: jax.Device) -> None:
    x = jax.device_put(np.arange(4, dtype=np.float32), device)
    found = float(jax.jit(lambda v: jnp.sum(v * v))(x))
    if found != 14.0:
        raise RuntimeError(f"it computes 0 + 1 + 4 + 9 as {found}")


def _start_failure(candidate: _Candidate, error: Exception) -> str:
    # Without JAX's own advice, which is about its default and not about this choice.
    lines = str(error).partition(" (set JAX_PLATFORMS=")[0].splitlines()
    said = lines[0] if lines else type(error).__name__
    if candidate.plugin is not None:
        name = plugins.label(candidate.plugin)
        return f"{name} does not start: {said}; use --backend cpu, or reinstall it"
    if candidate.name == "metal":
        command = plugins.install_command(plugins.read_host())
        return f"no Metal plugin gives {candidate.platform!r} ({said}); run: {command}"
    if candidate.name != "gpu":
        return f"{candidate.name or 'JAX'} does not start: {said}"
    distribution = plugins.gpu_distribution(candidate.platform)
    if distribution is None:
        return (
            f"no CUDA or ROCm plugin of JAX is installed ({said}); "
            f"run: {plugins.INSTALL_CUDA}"
        )
    return (
        f"{distribution} finds no GPU to start on: {said}; "
        "see what nvidia-smi or rocm-smi lists, and CUDA_VISIBLE_DEVICES"
    )


def _describe(
    candidate: _Candidate, devices: list[jax.Device], reasons: tuple[str, ...] = ()
) -> Backend:
    platform = candidate.platform or devices[0].platform
    if not candidate.platform and platform == "cpu":
        unused = map(plugins.gpu_distribution, plugins.GPU_PLUGINS)
        finder = " and ".join(filter(None, unused)) or "JAX"
        reasons = (*reasons, f"{finder} finds no GPU")
    return Backend(
        name=candidate.name or _name_of(platform),
        platform=platform,
        device_kind=devices[0].device_kind,
        device_count=len(devices),
        plugin=plugins.label(candidate.plugin) if candidate.plugin else "",
        notes=(*candidate.notes, *reasons),
    )
