"""Choosing a backend: causes in this process, real starts of JAX in fresh ones.

No Apple GPU is here. What a Mac would have is put in place: its description, the
plugins' metadata, and for the starts a CPU that is registered under a plugin's name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_plugins
import jax
import pytest

from jaxops import plugins
from jaxops.backend import BackendError, nvidia_flags, select_backend

ROOT = Path(__file__).parent.parent
MAC = plugins.Host("Darwin", "arm64", "15.1", (3, 12))
JAX_METAL = ("jax-metal", "0.1.1", ("jax>=0.4.34", "jaxlib>=0.4.34"))
JAX_MPS = ("jax-mps", "0.11.1", ("jax<0.12,>=0.11.0", "jaxlib<0.12,>=0.11.0"))
METALJAX = ("metaljax", "0.11.9", ("jax<0.12,>=0.11", "ml-dtypes", "numpy"))
JAX_GRAFT = ("jax-graft", "0.0.5", ("jax>=0.10.0", "pytest; extra == 'test'"))
JAX_METALLIB = ("jax-metallib", "0.10.1.0", ("jax<0.11,>=0.10.0", "jaxlib<0.11"))


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """An Apple-silicon Mac without plugins; returns the folder to add them to."""
    monkeypatch.setattr(plugins, "read_host", lambda: MAC)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def cause(name="metal"):
    """What an explicit request is refused with, in a process where the CPU runs."""
    with pytest.raises(BackendError) as caught:
        select_backend(name)
    return str(caught.value)


# --- causes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (("Linux", "x86_64", ""), "needs a Mac.*this is Linux on x86_64.*auto, cpu or"),
        (("Windows", "AMD64", ""), "needs a Mac.*this is Windows on AMD64"),
        (("Darwin", "x86_64", "14.5"), "needs Apple silicon.*x86_64.*Rosetta.*cpu"),
    ],
)
def test_not_an_apple_silicon_mac(monkeypatch, host, expected):
    monkeypatch.setattr(plugins, "read_host", lambda: plugins.Host(*host, (3, 12)))
    with pytest.raises(BackendError, match=expected):
        select_backend("metal")


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ((3, 10), 'pip install "jax-metal==0.1.1" "jax==0.4.34" "jaxlib==0.4.34"'),
        ((3, 11), 'pip install "jax-mps==0.10.11"'),
        ((3, 12), 'pip install "jax-mps==0.11.1"'),
        ((3, 13), 'pip install "jax-mps==0.11.1"'),
    ],
)
def test_no_plugin_names_the_command_for_this_python(monkeypatch, mac, python, command):
    host = plugins.Host("Darwin", "arm64", "15.1", python)
    monkeypatch.setattr(plugins, "read_host", lambda: host)
    assert f"no Metal plugin is installed; run: {command}" in cause()


@pytest.mark.parametrize(
    ("plugin", "jax_version", "expected"),
    [
        (JAX_METAL, "0.10.2", 'jax >=0.4.34,<0.5.1, and 0.10.2.*"jax==0.4.34" "jaxlib'),
        (JAX_METAL, "0.5.1", 'jax >=0.4.34,<0.5.1, and 0.5.1 .*"flax==0.10.4"'),
        (JAX_METAL, "0.4.33", "jax >=0.4.34,<0.5.1, and 0.4.33"),
        (JAX_MPS, "0.12.0.1", 'jax >=0.11.0,<0.12, and 0.12.0.1.*"jax-mps==0.11.1"'),
        (METALJAX, "0.10.2", "jax >=0.11,<0.12.*pip install --upgrade metaljax"),
        (JAX_METALLIB, "0.9.1", "jax >=0.10.0,<0.11, and 0.9.1"),
    ],
)
def test_a_plugin_for_another_jax(mac, plugin, jax_version, expected):
    fake_plugins.add_distribution(mac, *plugin)
    fake_plugins.add_jax(mac, jax_version)
    with pytest.raises(BackendError, match=f"{plugin[0]}.*does not fit.*{expected}"):
        select_backend("metal")


@pytest.mark.parametrize(
    ("plugin", "jax_version", "fits"),
    [
        (JAX_METAL, "0.4.34", True),
        (JAX_METAL, "0.5.0", True),
        (JAX_METAL, "0.5.1", False),
        (JAX_MPS, "0.11.2", True),
        (METALJAX, "0.11.0", True),
        (METALJAX, "0.12.0", False),
        (JAX_METALLIB, "0.10.2", True),
    ],
)
def test_version_table(mac, plugin, jax_version, fits):
    fake_plugins.add_distribution(mac, *plugin)
    fake_plugins.add_jax(mac, jax_version)
    entry = next(p for p in plugins.APPLE_PLUGINS if p.distribution == plugin[0])
    assert (plugins.misfit(entry, MAC) is None) == fits


def test_jaxlib_counts_as_much_as_jax(mac):
    fake_plugins.add_distribution(mac, *METALJAX)
    fake_plugins.add_jax(mac, "0.11.0", jaxlib="0.10.2")
    assert "does not fit this jaxlib" in cause()


def test_iree_takes_its_bounds_from_the_distribution_it_wraps(mac):
    fake_plugins.add_distribution(mac, "iree-metal", "3.11.0.dev1")
    inner = "iree-pjrt-plugin-metal-iree-metal"
    fake_plugins.add_distribution(mac, inner, "3.11.0.dev1", ("jax<0.12,>=0.10.2",))
    fake_plugins.add_jax(mac, "0.12.0")
    assert "it runs with jax >=0.10.2,<0.12, and 0.12.0" in cause()


def test_macos_too_old(mac):
    fake_plugins.add_distribution(mac, *JAX_GRAFT)
    fake_plugins.add_jax(mac, "0.11.0")
    assert "jax-graft 0.0.5 needs macOS 26.0 or newer, and this is 15.1" in cause()


def test_two_plugins_with_one_platform_name(mac):
    fake_plugins.add_distribution(mac, *JAX_MPS)
    fake_plugins.add_distribution(mac, *JAX_METALLIB)
    message = cause()
    assert "jax-mps 0.11.1 and jax-metallib 0.10.1.0 both register" in message
    assert message.endswith("pip uninstall jax-metallib")


def test_gpu_is_cuda_or_rocm_and_not_on_a_mac(mac):
    assert "macOS has neither; use --backend metal" in cause("gpu")


def test_a_plugin_that_would_fit_comes_too_late_here(mac):
    fake_plugins.add_distribution(mac, *METALJAX)
    fake_plugins.add_jax(mac, "0.11.0")
    assert "came too late: JAX already runs on cpu" in cause()


def test_names():
    with pytest.raises(ValueError, match="one of auto, cpu, gpu, metal; got 'mps'"):
        select_backend("mps")


def test_what_runs_is_described():
    running = select_backend("auto")
    assert (running.name, running.platform, running.plugin) == ("cpu", "cpu", "")
    assert running == select_backend("cpu")
    assert str(running).startswith(f"cpu (jax {jax.__version__})")


def test_install_commands_are_the_pins_of_the_extras():
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    pins = {name: [r.split(";")[0] for r in extras[name]] for name in ("metal", "mps")}
    metal = " ".join(f'"{pin}"' for pin in pins["metal"])
    assert f"pip install {metal}" == plugins.INSTALL_METAL
    for command in (plugins.INSTALL_MPS_PYTHON_311, plugins.INSTALL_MPS):
        assert command.removeprefix("pip install ").strip('"') in pins["mps"]


# --- real starts ----------------------------------------------------------------------

PRELUDE = """
import json, os, sys
import jax
from jaxops import plugins, select_backend, BackendError
said = {}
def attempt(key, name):
    try:
        said[key] = str(select_backend(name))
    except BackendError as error:
        said[key] = "refused: " + str(error)
def state():
    said["platforms"] = jax.config.jax_platforms
    said["default is metal's"] = jax.devices()[0] in jax.devices("METAL")
    said["cpu device"] = jax.devices("cpu")[0].platform
    said["tf32"] = os.environ.get("MLX_ENABLE_TF32")
    said["compatibility"] = os.environ.get("ENABLE_PJRT_COMPATIBILITY")
    said["six"] = float(jax.numpy.arange(4.0).sum())
"""
AS_MAC = f"plugins.read_host = lambda: plugins.{MAC!r}\n"


def start(folder, code, host=AS_MAC, **environment):
    """Run `code` in a fresh process that has `folder`'s plugins; what it said."""
    removed = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "MLX_ENABLE_TF32")
    inherited = {k: v for k, v in os.environ.items() if k not in removed}
    path = os.pathsep.join((str(folder), str(ROOT)))
    result = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}{host}{code}\nprint(json.dumps(said))"],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def apple(tmp_path):
    """A folder with jax-metal, which starts, and a jax that it fits."""
    fake_plugins.add_plugin(tmp_path, *JAX_METAL, platform="METAL")
    fake_plugins.add_jax(tmp_path, "0.4.34")
    return tmp_path


def test_metal_starts_and_keeps_the_cpu(apple):
    code = "attempt('metal', 'metal'); attempt('again', 'auto'); state()\n"
    said = start(apple, code + "attempt('cpu', 'cpu')")
    assert said["metal"].startswith("metal") and "jax-metal 0.1.1" in said["metal"]
    assert said["again"] == said["metal"]
    assert said["default is metal's"] and said["cpu device"] == "cpu"
    assert (said["tf32"], said["compatibility"]) == ("0", "1")
    assert said["six"] == 6.0
    assert "already runs on METAL, because an earlier select_backend" in said["cpu"]


def test_users_platforms_are_respected(apple):
    said = start(apple, "attempt('auto', 'auto'); state()", JAX_PLATFORMS="METAL")
    assert said["auto"].startswith("metal") and said["platforms"] == "METAL,cpu"
    said = start(
        apple,
        "attempt('metal', 'metal'); attempt('auto', 'auto')",
        JAX_PLATFORMS="cpu",
    )
    assert "refused: metal was asked for, but JAX_PLATFORMS=cpu" in said["metal"]
    assert said["auto"].startswith("cpu")


def test_a_plugin_that_does_not_start_leaves_jax_as_it_was(apple):
    (apple / "fake_jax_metal.py").write_text(
        fake_plugins.FAILS_TO_START.format(platform="METAL")
    )
    code = (
        "attempt('metal', 'metal'); said['after'] = jax.config.jax_platforms\n"
        "attempt('auto', 'auto'); said['six'] = float(jax.numpy.arange(4.0).sum())"
    )
    said = start(apple, code)
    for key in ("metal", "auto"):
        assert "jax-metal 0.1.1 does not start:" in said[key]
        assert "no Metal device answers" in said[key]
    assert said["metal"].startswith("refused") and said["auto"].startswith("cpu")
    assert said["after"] is None and said["six"] == 6.0


def test_a_plugin_that_starts_but_cannot_compute_is_left_for_the_cpu(apple):
    code = """
from jaxops import backend
true_check = backend._check_result
def fails_once(device):
    backend._check_result = true_check
    raise RuntimeError("UNIMPLEMENTED: default_memory_space is not supported")
backend._check_result = fails_once
attempt("auto", "auto")
said["platforms"] = jax.config.jax_platforms
said["six"] = float(jax.numpy.arange(4.0).sum())
"""
    said = start(apple, code)
    assert said["auto"].startswith("cpu")
    assert "default_memory_space is not supported" in said["auto"]
    assert said["platforms"] == "cpu" and said["six"] == 6.0


def test_metadata_without_its_module_does_not_start(apple):
    (apple / "fake_jax_metal.py").unlink()
    said = start(apple, "attempt('metal', 'metal')")
    assert "jax-metal 0.1.1 does not start: Unable to init" in said["metal"]


def test_two_plugins_that_fit(tmp_path):
    fake_plugins.add_plugin(tmp_path, *JAX_MPS, platform="mps")
    fake_plugins.add_plugin(tmp_path, *METALJAX, platform="metal")
    fake_plugins.add_jax(tmp_path, "0.11.2")
    code = "attempt('metal', 'metal'); said['platforms'] = jax.config.jax_platforms"
    said = start(tmp_path, code, MLX_ENABLE_TF32="1")
    assert said["platforms"] == "mps,cpu"
    assert "jax-mps rather than metaljax 0.11.9, because it is pref" in said["metal"]
    assert "JAX_PLATFORMS=metal,cpu takes the other" in said["metal"]
    assert "MLX_ENABLE_TF32 is not 0" in said["metal"]
    said = start(tmp_path, code, JAX_PLATFORMS="metal,mps")
    assert said["platforms"] == "metal,cpu"
    assert "metaljax rather than jax-mps 0.11.1, because JAX_PLATFORMS" in said["metal"]
    said = start(tmp_path, code, JAX_PLATFORMS="metal")
    assert "metaljax 0.11.9" in said["metal"] and "rather than" not in said["metal"]


def test_the_plugin_that_fits_is_taken_and_the_other_explained(apple):
    fake_plugins.add_plugin(apple, *JAX_MPS, platform="mps")
    said = start(apple, "attempt('metal', 'metal')")
    assert "(jax-metal 0.1.1" in said["metal"]
    assert "not jax-mps 0.11.1: jax-mps 0.11.1 does not fit this jax" in said["metal"]


def test_a_plugin_nobody_knows_is_tried_if_the_user_lists_it(tmp_path):
    unknown = ("some-plugin", "1.0", ())
    fake_plugins.add_plugin(tmp_path, *unknown, platform="mps")
    code = "attempt('metal', 'metal'); said['platforms'] = jax.config.jax_platforms"
    said = start(tmp_path, code, JAX_PLATFORMS="mps,cpu")
    assert said["metal"].startswith("metal") and said["platforms"] == "mps,cpu"
    said = start(tmp_path, code, JAX_PLATFORMS="mtl,cpu")
    assert "refused: no Metal plugin gives 'mtl'" in said["metal"]


def test_float64_and_metal_exclude_each_other(apple):
    code = "attempt('metal', 'metal'); attempt('auto', 'auto')"
    said = start(apple, code, JAX_ENABLE_X64="1")
    assert "refused: no Apple GPU has float64" in said["metal"]
    assert said["auto"].startswith("cpu") and "float64" in said["auto"]


def test_an_array_before_the_choice(apple):
    code = "jax.numpy.zeros(1); attempt('cpu', 'cpu'); attempt('metal', 'metal')"
    said = start(apple, code, JAX_PLATFORMS="cpu,METAL")
    assert "JAX had chosen it before select_backend" in said["cpu"]
    assert "already runs on cpu, because an array was made" in said["metal"]


def test_no_gpu_plugin(tmp_path):
    if any(map(plugins.gpu_distribution, plugins.GPU_PLUGINS)):
        pytest.skip("a GPU plugin is installed here")
    code = "attempt('gpu', 'gpu'); attempt('auto', 'auto')"
    said = start(tmp_path, code, host="")
    assert "refused: no CUDA or ROCm plugin" in said["gpu"]
    assert said["gpu"].endswith('run: pip install "jax[cuda12]"')
    assert said["auto"].startswith("cpu") and "JAX finds no GPU" in said["auto"]


def test_a_gpu_plugin_without_a_gpu(tmp_path):
    fake_plugins.add_distribution(tmp_path, "jax-cuda12-plugin", "0.10.2")
    code = "attempt('gpu', 'gpu'); attempt('auto', 'auto')"
    said = start(tmp_path, code, host="", CUDA_VISIBLE_DEVICES="")
    assert "jax-cuda12-plugin 0.10.2 finds no GPU to start on" in said["gpu"]
    assert "jax-cuda12-plugin 0.10.2 finds no GPU" in said["auto"]


CUBLAS, FUSED = (
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_backend_extra_options=-nvptx-fma-level=2",
)


@pytest.mark.parametrize(
    ("version", "flags", "expected"),
    [
        ((0, 11, 2), "", f"{CUBLAS} {FUSED}"),
        ((0, 10, 0), "--a=1", f"--a=1 {CUBLAS} {FUSED}"),
        ((0, 9, 9), "", CUBLAS),
        ((0, 13, 0), "", CUBLAS),
        (
            (0, 12, 0),
            "--xla_gpu_enable_triton_gemm=true",
            f"--xla_gpu_enable_triton_gemm=true {FUSED}",
        ),
        (
            (0, 12, 0),
            "--xla_backend_extra_options=-a",
            f"--xla_backend_extra_options=-a {CUBLAS}",
        ),
    ],
)
def test_flags_for_an_nvidia_gpu_leave_the_users_choice(
    version, flags, expected, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert nvidia_flags(flags) == expected


def test_xla_knows_these_flags():
    """It ends a process that names another."""
    environment = {**os.environ, "XLA_FLAGS": nvidia_flags("")}
    code = "import jax; print(jax.numpy.ones(2).sum())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "2.0\n", done.stderr
