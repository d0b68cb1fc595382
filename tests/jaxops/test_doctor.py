"""The doctor on machines that are put in place, and its probes on faults put there."""

import dataclasses
import os
import subprocess
import sys

import fake_plugins
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import doctor, plugins
from jaxops.doctor import diagnose
from jaxops.metal import probes
from jaxops.metal.probes import PROBES, run_probe

MAC = plugins.Host("Darwin", "arm64", "15.1", (3, 12))
JAX_METAL = ("jax-metal", "0.1.1", ("jax>=0.4.34", "jaxlib>=0.4.34"))
JAX_MPS = ("jax-mps", "0.11.1", ("jax<0.12,>=0.11.0", "jaxlib<0.12,>=0.11.0"))
METALJAX = ("metaljax", "0.11.9", ("jax<0.12,>=0.11",))
JAX_METALLIB = ("jax-metallib", "0.10.1.0", ("jax<0.12,>=0.10.0",))


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """A Mac without plugins; returns what puts distributions there."""
    monkeypatch.setattr(plugins, "read_host", lambda: MAC)
    monkeypatch.syspath_prepend(tmp_path)

    def install(jax_version, *distributions):
        fake_plugins.add_jax(tmp_path, jax_version)
        for name, version, requires in distributions:
            fake_plugins.add_distribution(tmp_path, name, version, requires)

    return install


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (("Linux", "x86_64", ""), "needs a Mac with Apple silicon, and this is Linux"),
        (("Darwin", "x86_64", "14.5"), "install an arm64 Python"),
    ],
)
def test_not_an_apple_silicon_mac(host, told):
    found = diagnose(plugins.Host(*host, (3, 12)))
    assert told in "\n".join(found.lines)
    assert found.next_command == "python -m models.verify --backend auto"
    assert found.is_well  # nothing to mend: no plugin is expected there


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ((3, 10), plugins.INSTALL_METAL),
        ((3, 11), plugins.INSTALL_MPS_PYTHON_311),
        ((3, 12), plugins.INSTALL_MPS),
    ],
)
def test_no_plugin(mac, python, command):
    found = diagnose(dataclasses.replace(MAC, python=python))
    assert "none is installed" in "\n".join(found.lines)
    assert (found.next_command, found.is_well) == (command, False)


def test_a_plugin_that_fits(mac):
    mac("0.11.0", JAX_MPS)
    found = diagnose(environment={"MLX_ENABLE_TF32": "0"})
    text = "\n".join(found.lines)
    assert "macOS 15.1 on arm64, Python 3.12" in text and "jax 0.11.0" in text
    assert "jax-mps 0.11.1: fits" in text and "MLX_ENABLE_TF32=0" in text
    assert found.next_command == "python -m models.verify --backend metal"
    assert found.is_well and found.backend == "metal"


@pytest.mark.parametrize(
    ("jax_version", "plugin", "command"),
    [
        ("0.12.0", JAX_MPS, plugins.INSTALL_MPS),
        ("0.10.2", JAX_METAL, plugins.INSTALL_METAL),
        ("0.10.2", METALJAX, "pip install --upgrade metaljax"),
    ],
)
def test_a_plugin_for_another_jax(mac, jax_version, plugin, command):
    mac(jax_version, plugin)
    found = diagnose()
    text = "\n".join(found.lines)
    assert f"{plugin[0]} {plugin[1]} does not fit this jax" in text
    assert f"{jax_version} is installed" in text
    assert (found.next_command, found.is_well) == (command, False)


def test_macos_too_old(mac):
    mac("0.11.0", JAX_MPS)
    found = diagnose(dataclasses.replace(MAC, macos="13.5"))
    assert "needs macOS 14.0 or newer, and this is 13.5" in "\n".join(found.lines)
    assert found.next_command == "python -m models.verify --backend cpu"


def test_two_plugins_at_once(mac):
    mac("0.11.0", JAX_MPS, METALJAX)
    found = diagnose(environment={})
    text = "\n".join(found.lines)
    assert "jax-mps 0.11.1 is taken" in text
    assert "JAX_PLATFORMS=metal,cpu takes metaljax 0.11.9" in text
    assert "MLX_ENABLE_TF32=unset" in text and "export MLX_ENABLE_TF32=0" in text
    assert found.is_well


def test_two_plugins_under_one_name(mac):
    mac("0.11.0", JAX_MPS, JAX_METALLIB)
    found = diagnose()
    assert "register one name, 'mps'" in "\n".join(found.lines)
    assert (found.next_command, found.is_well) == ("pip uninstall jax-metallib", False)


def test_one_that_fits_beside_one_that_does_not(mac):
    mac("0.11.0", JAX_METAL, JAX_MPS)
    found = diagnose()
    text = "\n".join(found.lines)
    assert "jax-metal 0.1.1 does not fit" in text and "jax-mps 0.11.1: fits" in text
    assert found.is_well and found.backend == "metal"


def test_settings_are_told(mac):
    mac("0.11.0", JAX_MPS)
    text = "\n".join(diagnose(environment={"JAX_ENABLE_X64": "1"}).lines)
    assert "JAX_ENABLE_X64=1 (no Apple GPU has float64; unset it)" in text


# --- probes ---------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_cpu_is_right(probe):
    outcome = run_probe(probe)
    assert outcome.ok, outcome
    assert str(outcome).startswith("ok ")


def tf32(x):
    """Rounded to the ten bits that TF32 keeps of a mantissa."""
    bits = np.asarray(x).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def with_a_clamp_that_moves_each_index(x, starts, sizes):
    """jax-metal's: [3, 3] where [2, 3] is right."""
    at = jnp.clip(starts[0] + jnp.arange(sizes[0]), 0, x.shape[0] - 1)
    return x[at]


def without_groups(x, kernel, strides, padding, **options):
    """The gradient that took a grouped convolution for a dense one, in short."""
    count = options.pop("feature_group_count")
    dense = jnp.concatenate([kernel] * count, axis=2) / count
    return CONVOLVE(x, dense, strides, padding, **options)


CONVOLVE = jax.lax.conv_general_dilated


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault"),
    [
        (
            "dynamic_slice that",
            "jax.lax",
            "dynamic_slice",
            with_a_clamp_that_moves_each_index,
        ),
        ("grouped", "jax.lax", "conv_general_dilated", without_groups),
        ("its gradient", "jax.lax", "conv_general_dilated", without_groups),
        ("second derivative", "jax.nn", "gelu", lambda x, approximate: jnp.tanh(x)),
        (
            "random bits",
            "jax.random",
            "bits",
            lambda key, shape: jnp.arange(8, dtype=jnp.uint32),
        ),
    ],
)
def test_a_fault_is_seen(monkeypatch, name, owner, attribute, fault):
    monkeypatch.setattr(f"{owner}.{attribute}", fault)
    probe = next(p for p in PROBES if p.name.startswith(name))
    outcome = run_probe(probe)
    assert not outcome.ok
    assert str(outcome).startswith("WRONG") and probe.remedy in str(outcome)


def test_tf32_is_seen_and_float32_is_not(monkeypatch):
    probe = next(p for p in PROBES if p.name.startswith("product"))
    left, right = probes._random(64, 512), probes._random(512, 64)
    coarse = dataclasses.replace(probe, computed=lambda: tf32(left) @ tf32(right))
    assert 1e-4 < run_probe(coarse).error < 1e-2 and not run_probe(coarse).ok
    fine = dataclasses.replace(probe, computed=lambda: left @ right)
    assert run_probe(fine).ok


def test_what_a_device_refuses_is_told(monkeypatch):
    def refuse():
        raise RuntimeError("failed to legalize operation\nand more")

    outcome = run_probe(dataclasses.replace(PROBES[0], computed=refuse))
    assert not outcome.ok
    assert "FAILS" in str(outcome) and "failed to legalize operation;" in str(outcome)
    nothing = dataclasses.replace(PROBES[0], computed=lambda: jnp.array([jnp.nan, 3.0]))
    assert not run_probe(nothing).ok


# --- the command ----------------------------------------------------------------------


def test_the_command_runs_the_probes(capsys):
    assert doctor.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("probe     ok") for line in said) == len(PROBES)
    assert said[-1].startswith("next ")


def test_the_command_tells_what_is_wrong_with_the_device(monkeypatch, capsys):
    broken = dataclasses.replace(PROBES[0], expected=lambda: np.array([9.0, 9.0]))
    monkeypatch.setattr(doctor, "PROBES", (broken,))
    assert doctor.main([]) == 1
    assert "probe     WRONG" in capsys.readouterr().out


def test_from_the_shell():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxops.doctor", "--no-probes"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("machine ") and "probe" not in run.stdout
