"""What this machine has for JAX on an Apple GPU, what does not fit, what to do next.

``python -m jaxops.doctor`` prints it, runs a small probe for each fault that a plugin
is known to have without a word (``--no-probes`` leaves them out), and ends with the
next command. It exits with 1 where something is to be mended.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxops import plugins
from jaxops.backend import BackendError, select_backend
from jaxops.metal.probes import NOT_RUN, PROBES, run_probe

VERIFY = "python -m models.verify --backend"


@dataclass(frozen=True)
class Diagnosis:
    """What is installed, and what follows.

    Attributes:
        lines: for people: the machine, versions, each plugin, settings.
        next_command: what to type next.
        backend: what to start: "metal" where a plugin fits, else "auto".
        is_well: whether nothing is to be mended first.
    """

    lines: tuple[str, ...]
    next_command: str
    backend: str
    is_well: bool


def diagnose(
    host: plugins.Host | None = None, environment: Mapping[str, str] | None = None
) -> Diagnosis:
    """Read what is installed, without starting anything.

    Args:
        host: this machine unless told otherwise.
        environment: ``os.environ`` unless told otherwise.
    """
    host = plugins.read_host() if host is None else host
    environment = os.environ if environment is None else environment
    installed = [
        plugin
        for plugin in plugins.APPLE_PLUGINS
        if plugins.installed_version(plugin.distribution)
    ]
    lines = [_machine(host), _versions()]
    obstacle = plugins.host_obstacle(host)
    if obstacle:
        lines += [f"plugins   {plugins.label(plugin)}" for plugin in installed]
        lines.append(f"plugins   none can run here: {obstacle}")
        return Diagnosis(tuple(lines), f"{VERIFY} auto", "auto", not installed)
    misfits = {plugin: plugins.misfit(plugin, host) for plugin in installed}
    lines += [
        f"plugins   {plugins.label(plugin)}: {misfit or 'fits'}"
        for plugin, misfit in misfits.items()
    ]
    problem, command = _choose(host, misfits)
    if problem:
        lines.append(f"plugins   {problem}")
    lines += _settings(installed, environment)
    if command:
        return Diagnosis(tuple(lines), command, "auto", False)
    return Diagnosis(tuple(lines), f"{VERIFY} metal", "metal", True)


def _machine(host: plugins.Host) -> str:
    system = f"macOS {host.macos}" if host.system == "Darwin" else host.system
    python = ".".join(map(str, host.python))
    return f"machine   {system} on {host.machine}, Python {python}"


def _versions() -> str:
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    found = [
        f"{name} {plugins.installed_version(name) or 'missing'}" for name in packages
    ]
    return f"versions  {', '.join(found)}"


def _choose(
    host: plugins.Host, misfits: dict[plugins.Plugin, str | None]
) -> tuple[str, str]:
    """What is wrong or to be known about the plugins, and the command that mends it."""
    if not misfits:
        return "none is installed", plugins.install_command(host)
    by_platform: dict[str, list[plugins.Plugin]] = {}
    for plugin in misfits:
        by_platform.setdefault(plugin.platform, []).append(plugin)
    for same in by_platform.values():
        if len(same) > 1:
            names = " and ".join(map(plugins.label, same))
            problem = f"{names} register one name, {same[0].platform!r}"
            return problem, f"pip uninstall {same[1].distribution}"
    fitting = [plugin for plugin, misfit in misfits.items() if misfit is None]
    if not fitting:
        told = next(iter(misfits.values()))
        _, colon, command = told.rpartition("run: ")
        return "none fits", command if colon else f"{VERIFY} cpu"
    if len(fitting) == 1:
        return "", ""
    others = ", ".join(
        f"JAX_PLATFORMS={plugin.platform},cpu takes {plugins.label(plugin)}"
        for plugin in fitting[1:]
    )
    return f"{plugins.label(fitting[0])} is taken, the first that fits; {others}", ""


def _settings(
    installed: Sequence[plugins.Plugin], environment: Mapping[str, str]
) -> list[str]:
    """What the plugins read from the environment, as far as it is set or should be."""
    lines = []
    if any(plugin.uses_mlx for plugin in installed):
        tf32 = environment.get("MLX_ENABLE_TF32")
        if tf32 == "0":
            lines.append("settings  MLX_ENABLE_TF32=0: float32 products are float32")
        else:
            lines.append(
                f"settings  MLX_ENABLE_TF32={tf32 or 'unset'}: float32 products may be "
                "as coarse as 1e-3 (TF32); run: export MLX_ENABLE_TF32=0"
            )
    meanings = {
        "METALJAX_MATMUL_PRECISION": "products as coarse as 4e-3 where it is default",
        "JAX_PLATFORMS": "the platforms that JAX may take",
        "JAX_ENABLE_X64": "no Apple GPU has float64; unset it",
        "JAX_MPS_CACHE_LIMIT_BYTES": "memory that jax-mps keeps for reuse",
        "JAX_MPS_ASYNC_DISPATCH": "1: jax-mps does not wait for each call",
        "ENABLE_PJRT_COMPATIBILITY": "1: jax-metal takes other versions of jax",
    }
    lines += [
        f"settings  {name}={environment[name]} ({meaning})"
        for name, meaning in meanings.items()
        if name in environment
    ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxops.doctor", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--no-probes", action="store_true", help="start nothing, compute nothing"
    )
    options = parser.parse_args(argv)
    found = diagnose()
    print("\n".join(found.lines))
    is_well, command = found.is_well, found.next_command
    if not options.no_probes:
        is_well, command = _probe(found, is_well, command)
    print(f"next      {command}")
    return 0 if is_well else 1


def _probe(found: Diagnosis, is_well: bool, command: str) -> tuple[bool, str]:
    try:
        backend = select_backend(found.backend)
    except BackendError as error:
        print(f"device    {error}")
        return False, f"{VERIFY} cpu"
    print(f"device    {backend}; memory: {_memory()}")
    outcomes = [run_probe(probe) for probe in PROBES]
    for outcome in outcomes:
        print(f"probe     {outcome}")
    if backend.name == "metal":
        print(f"probe     {NOT_RUN}")
    return is_well and all(outcome.ok for outcome in outcomes), command


def _memory() -> str:
    """What the device says of its memory; most plugins say nothing."""
    try:
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    except Exception as error:  # plugins raise where they do not know
        return f"not told ({type(error).__name__})"
    return "not told" if limit is None else f"{limit / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
