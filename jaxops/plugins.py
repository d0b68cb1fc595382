"""The plugins that give JAX a GPU: what is installed, and whether it fits this machine.

JAX finds an accelerator through a PJRT plugin, a separate distribution. Several give it
an Apple GPU; each registers a platform name of its own. This module reads the installed
distributions' metadata. It starts nothing and makes no array.
"""

import platform as machine_platform
import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


@dataclass(frozen=True)
class Plugin:
    """One Apple plugin, as far as choosing it needs to know.

    Attributes:
        distribution: name on the package index.
        platform: the name it registers with JAX, as written in `JAX_PLATFORMS`.
        jax: versions of jax and jaxlib it runs with, where its own metadata is too
            wide or silent; its metadata counts as well.
        jax_from: the distribution whose metadata names those versions, if another.
        macos: the oldest macOS it starts on.
        uses_mlx: computes with MLX, so that `MLX_ENABLE_TF32` decides its precision.
    """

    distribution: str
    platform: str
    macos: str
    jax: str = ""
    jax_from: str = ""
    uses_mlx: bool = False


# In order of preference, where more than one fits: the maintained ones first.
# jax-metal's metadata has no upper bound, but from jax 0.5.1 on every array fails with
# "UNIMPLEMENTED: default_memory_space is not supported".
APPLE_PLUGINS = (
    Plugin("jax-mps", "mps", macos="14.0", uses_mlx=True),
    Plugin("metaljax", "metal", macos="14.0", uses_mlx=True),
    Plugin("jax-metal", "METAL", macos="14.4", jax=">=0.4.34,<0.5.1"),
    Plugin("jax-graft", "mtl", macos="26.0"),
    Plugin("jax-metallib", "mps", macos="13.0"),
    Plugin(
        "iree-metal",
        "iree_metal",
        macos="13.0",
        jax_from="iree-pjrt-plugin-metal-iree-metal",
    ),
)
APPLE_PLATFORMS = tuple(dict.fromkeys(plugin.platform for plugin in APPLE_PLUGINS))

# Platform name -> distributions that give it, newest first.
GPU_PLUGINS = {
    "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "rocm": ("jax-rocm7-plugin", "jax-rocm60-plugin"),
}

# What a user types. They are the pins of the extras in pyproject.toml, and they work
# whether or not this project was installed with pip.
INSTALL_METAL = (
    'pip install "jax-metal==0.1.1" "jax==0.4.34" "jaxlib==0.4.34" '
    '"flax==0.10.4" "optax==0.2.5"'
)
INSTALL_MPS_PYTHON_311 = 'pip install "jax-mps==0.10.11"'
INSTALL_MPS = 'pip install "jax-mps==0.11.1"'
INSTALL_CUDA = 'pip install "jax[cuda12]"'


@dataclass(frozen=True)
class Host:
    """This machine: `system` and `machine` as in `platform`, macOS version or ""."""

    system: str
    machine: str
    macos: str
    python: tuple[int, int]


def read_host() -> Host:
    """Describe the machine that this process runs on."""
    return Host(
        system=machine_platform.system(),
        machine=machine_platform.machine(),
        macos=machine_platform.mac_ver()[0],
        python=sys.version_info[:2],
    )


def install_command(host: Host) -> str:
    """The command that installs an Apple plugin for this Python."""
    if host.python >= (3, 12):
        return INSTALL_MPS
    return INSTALL_MPS_PYTHON_311 if host.python >= (3, 11) else INSTALL_METAL


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def gpu_distribution(platform: str) -> str | None:
    """Name and version of the installed plugin for "cuda" or "rocm", or None."""
    for name in GPU_PLUGINS.get(platform, ()):
        if version := installed_version(name):
            return f"{name} {version}"
    return None


def label(plugin: Plugin) -> str:
    """Distribution and version, as in "jax-mps 0.11.1"."""
    return f"{plugin.distribution} {installed_version(plugin.distribution)}"


def host_obstacle(host: Host) -> str | None:
    """Why no Apple plugin can run on this machine, with the remedy, or None."""
    if host.system != "Darwin":
        return (
            "a Metal backend needs a Mac with Apple silicon, and this is "
            f"{host.system} on {host.machine}; use --backend auto, cpu or gpu here, "
            f"and on the Mac run: {install_command(host)}"
        )
    if host.machine != "arm64":
        return (
            f"a Metal backend needs Apple silicon, and this Python runs as "
            f"{host.machine}; on an Apple-silicon Mac (under Rosetta) install an arm64 "
            "Python, on an Intel Mac use --backend cpu"
        )
    return None


def misfit(plugin: Plugin, host: Host) -> str | None:
    """Why an installed plugin cannot run here, with the remedy, or None if it fits."""
    if Version(host.macos) < Version(plugin.macos):
        return (
            f"{label(plugin)} needs macOS {plugin.macos} or newer, and this is "
            f"{host.macos}; update macOS, or use --backend cpu"
        )
    bounds = _required_versions(plugin)
    for package in ("jax", "jaxlib"):
        found = installed_version(package)
        if found is None:
            return f"{package} is not installed; run: pip install {package}"
        if not bounds[package].contains(found, prereleases=True):
            return (
                f"{label(plugin)} does not fit this {package}: it runs with {package} "
                f"{_text(bounds[package])}, and {found} is installed; "
                f"run: {_mend(plugin)}"
            )
    return None


def _required_versions(plugin: Plugin) -> dict[str, SpecifierSet]:
    bounds = {name: SpecifierSet(plugin.jax) for name in ("jax", "jaxlib")}
    source = plugin.jax_from or plugin.distribution
    if installed_version(source) is None:
        return bounds
    for line in metadata.requires(source) or ():
        requirement = Requirement(line)
        if requirement.name in bounds and not requirement.marker:
            bounds[requirement.name] &= requirement.specifier
    if not bounds["jaxlib"]:  # metaljax names jax alone; jaxlib goes with it
        bounds["jaxlib"] = bounds["jax"]
    return bounds


def _text(bounds: SpecifierSet) -> str:
    """The lower bound first, as people write it; the library keeps no order."""
    return ",".join(sorted(set(map(str, bounds)), reverse=True))


def _mend(plugin: Plugin) -> str:
    if plugin.distribution == "jax-metal":
        return INSTALL_METAL
    if plugin.distribution == "jax-mps":
        return install_command(read_host())
    return f"pip install --upgrade {plugin.distribution}"
