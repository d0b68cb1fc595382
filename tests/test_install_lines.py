"""The install commands of the README and the docs, resolved for a Mac from here.

Nothing is installed and no wheel is downloaded whole: pip is asked what it would take.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TEXTS = ["README.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
# Python, extra: the plugin, and the jax that goes with it.
ON_A_MAC = {
    ("3.11", "metal"): ("jax-metal", "0.4.34"),
    ("3.11", "mps"): ("jax-mps", "0.10."),
    ("3.12", "metal"): ("jax-metal", "0.4.34"),
    ("3.12", "mps"): ("jax-mps", "0.11."),
    ("3.12", "metaljax"): ("metaljax", "0.11."),
}
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def requirements(extra: str, python: str) -> list[str]:
    """Of the project with an extra, on a Mac with Apple silicon, without markers."""
    machine = {
        "sys_platform": "darwin",
        "platform_machine": "arm64",
        "platform_system": "Darwin",
        "os_name": "posix",
        "python_version": python,
        "python_full_version": f"{python}.9",
        "extra": "",
    }
    found = []
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            requirement.marker = None
            found.append(str(requirement))
    return found


@pytest.mark.parametrize("extra", [e for python, e in ON_A_MAC if python == HERE])
def test_an_extra_resolves_for_a_mac(extra, tmp_path):
    plugin, jax_version = ON_A_MAC[HERE, extra]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    command += ["--ignore-installed", "--target", str(tmp_path), "--report", "-"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", HERE]
    for system in ("14_0", "13_0", "12_0", "11_0"):
        command += ["--platform", f"macosx_{system}_arm64"]
    command += ["--platform", "macosx_10_14_universal2"]
    result = subprocess.run(
        [*command, *requirements(extra, HERE)], capture_output=True, text=True
    )
    if "No matching distribution found for jax" in result.stderr and not _has_index():
        pytest.skip("pip reaches no package index")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)["install"]
    versions = {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in report}
    assert plugin in versions
    assert versions["jax"].startswith(jax_version)
    assert versions["jaxlib"] == versions["jax"]


def _has_index() -> bool:
    command = [sys.executable, "-m", "pip", "index", "versions", "numpy"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", TEXTS)
def test_the_extras_that_texts_name_are_there(name):
    text = (ROOT / name).read_text("utf-8")
    named = re.findall(r'pip install (?:-\S+ )*"?\.\[([\w,]+)\]', text)
    for extras in named:
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert named or name != "README.md"
