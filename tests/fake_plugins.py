"""Plugins that are not there: metadata for `importlib.metadata`, and a CPU in disguise.

A folder with these on `sys.path` is what an installed plugin looks like, to this
project and to JAX. The fake plugin registers a second CPU client under an Apple
platform's name, so that a real JAX really starts on it and computes.
"""

from pathlib import Path

STARTS = """
def initialize():
    from jax._src import xla_bridge
    xla_bridge.register_backend_factory(
        {platform!r}, xla_bridge.make_cpu_client, priority=500
    )
"""
FAILS_TO_START = """
def initialize():
    def factory():
        raise RuntimeError("no Metal device answers")
    from jax._src import xla_bridge
    xla_bridge.register_backend_factory({platform!r}, factory, priority=500)
"""


def add_distribution(
    folder: Path, name: str, version: str, requires: tuple[str, ...] = ()
) -> Path:
    """Make `importlib.metadata` find this distribution in `folder`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return info


def add_jax(folder: Path, version: str, jaxlib: str | None = None) -> None:
    """Make jax and jaxlib look like these versions, to readers of metadata alone."""
    add_distribution(folder, "jax", version)
    add_distribution(folder, "jaxlib", jaxlib or version)


def add_plugin(
    folder: Path,
    name: str,
    version: str,
    requires: tuple[str, ...],
    platform: str,
    source: str = STARTS,
) -> None:
    """Add a distribution together with the module that JAX discovers through it."""
    module = f"fake_{name.replace('-', '_')}"
    info = add_distribution(folder, name, version, requires)
    (info / "entry_points.txt").write_text(f"[jax_plugins]\n{module} = {module}\n")
    (folder / f"{module}.py").write_text(source.format(platform=platform))
