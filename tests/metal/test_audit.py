"""The audit finds what was planted, where it was, and nothing in good programs."""

import os
import subprocess
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from jaxops.metal import audit as audit_module
from jaxops.metal.support import EFFECTS, TARGETS

HERE = "tests/metal/test_audit.py"
X = np.ones((2, 6, 8, 4), np.float32)
ROW = np.ones(8, np.float32)
KEY = np.asarray([0, 1], np.uint32)


def line_of(text):
    """The line of this file that ends with this comment."""
    with open(__file__, encoding="utf-8") as file:
        lines = [n for n, line in enumerate(file, 1) if line.endswith(f"# {text}\n")]
    assert len(lines) == 1
    return f"{HERE}:{lines[0]}"


class ComplexWeight(nn.Module):
    @nn.compact
    def __call__(self, x):
        def init(key, shape):
            return jax.random.normal(key, shape, jnp.complex64)  # complex init

        weight = self.param("weight", init, (x.shape[-1],))
        return x + jnp.sum(weight.real)


def complex_initialiser():
    return (lambda key: ComplexWeight().init(key, jnp.zeros((1, 3)))), (KEY,)


def fft_in_a_gradient():
    def loss(x):
        spectrum = jnp.fft.rfft(x)  # forward fft
        return jnp.sum(spectrum.real**2)

    return jax.grad(loss), (ROW,)


def rank_5_convolution_behind_vmap():
    kernel = np.ones((3, 3, 3, 2, 2), np.float32)

    def convolve(volume):
        return lax.conv_general_dilated(  # rank 5
            volume[None],
            kernel,
            (1, 1, 1),
            "SAME",
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )

    return jax.vmap(convolve), (np.ones((2, 4, 4, 4, 2), np.float32),)


def batch_that_does_not_lead():
    def product(x, w):
        return jnp.einsum("bixy,ioxy->boxy", x, w)  # batch behind

    return product, (X, np.ones((6, 3, 8, 4), np.float32))


def callback_inside_a_scan():
    def step(carry, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(np.sin, shape, x)  # callback
        return carry + y, y

    return (lambda xs: lax.scan(step, jnp.zeros((), xs.dtype), xs)), (ROW,)


def bfloat16_inside():
    def half(x):
        return jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype)  # bfloat16

    return half, (ROW,)


def switch():
    def choose(index, x):
        return lax.switch(index, [jnp.sin, jnp.cos, jnp.tan], x)  # switch

    return choose, (np.int32(1), ROW)


def idle_branch():
    def choose(which, x):
        return lax.cond(which, jnp.sin, lambda x: x, x)  # idle branch

    return choose, (np.bool_(True), ROW)


def several_reduced_at_once():
    return (lambda x: jnp.argmax(x)), (ROW,)  # argmax


def transposed_convolution():
    kernel = np.ones((2, 2, 4, 4), np.float32)

    def up(x):
        return lax.conv_transpose(x, kernel, (2, 2), "SAME")  # transposed

    return up, (X,)


def sharding():
    device = jax.devices()[0]

    def constrain(x):
        place = jax.sharding.SingleDeviceSharding(device)
        return lax.with_sharding_constraint(x, place)

    return constrain, (ROW,)


# What is planted, what each target says of it, and the operation that is named.
MPS_HAS_IT = METALJAX_HAS_IT = None
PLANTED = [
    (complex_initialiser, "complex init", "error", MPS_HAS_IT, METALJAX_HAS_IT),
    (fft_in_a_gradient, "forward fft", "error", MPS_HAS_IT, METALJAX_HAS_IT),
    (rank_5_convolution_behind_vmap, "rank 5", "crash", "slow", "slow"),
    (batch_that_does_not_lead, "batch behind", "error", None, None),
    (callback_inside_a_scan, "callback", "error", "error", "slow"),
    (bfloat16_inside, "bfloat16", "error", None, None),
    (switch, "switch", "error", None, None),
    (idle_branch, "idle branch", "error", None, None),
    (several_reduced_at_once, "argmax", "error", None, None),
    (transposed_convolution, "transposed", "error", "slow", "slow"),
]


@pytest.mark.parametrize(
    ("plant", "mark", "effects"),
    [pytest.param(p, mark, effects, id=p.__name__) for p, mark, *effects in PLANTED],
)
def test_what_is_planted_is_found_with_its_line(plant, mark, effects):
    function, arguments = plant()
    for target, effect in zip(TARGETS, effects, strict=True):
        report = jaxops.audit(function, *arguments, target=target)
        found = {*report.violations, *report.cautions}
        assert report.ok == (effect in (None, "slow")), report
        if effect is None:
            assert not found
            continue
        assert line_of(mark) in {violation.line for violation in found}, report
        assert effect in {violation.effect for violation in found}


def test_the_fft_of_a_gradient_is_seen_where_it_is_and_as_both():
    function, arguments = fft_in_a_gradient()
    report = jaxops.audit(function, *arguments)
    fft = [v for v in report if v.operation == "fft"]
    assert sum(v.count for v in fft) == 2  # forward, and its transpose
    assert "33883" in fft[0].source


def test_float64_is_found_under_x64(tmp_path):
    """In a process of its own, which has 64-bit numbers switched on."""
    (tmp_path / "wide.py").write_text(
        "import jax.numpy as jnp, numpy as np\n"
        "def scale(x):\n"
        "    return (x * np.float64(0.1)).astype(x.dtype)\n"
        "def same(x):\n"
        "    return x * jnp.float32(0.1)\n"
    )
    for name, code in (("scale", 1), ("same", 0)):
        run = command(
            f"wide:{name}", "--args", "f32[4]", "--target", "all", x64=tmp_path
        )
        assert run.returncode == code, run.stdout + run.stderr
        assert run.stdout.count("wide.py:3") >= 3 * code
        assert run.stdout.count("float64") >= 3 * code


HARMLESS = {
    "scan": (lambda x: lax.scan(lambda c, v: (c * v, c + v), x[0], x), ROW),
    "while": (lambda x: lax.fori_loop(0, 5, lambda i, v: v * 0.5, x), ROW),
    "cond": (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), ROW),
    "threefry": (
        lambda k: (
            jax.random.normal(k, (5, 3)),
            jax.random.uniform(jax.random.split(k)[1], (7,)),
            jax.random.bernoulli(k, 0.5, (4,)),
        ),
        KEY,
    ),
    "gather": (lambda x: jnp.take(x, jnp.asarray([3, 1, 1]), axis=1), X),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x)), ROW),
    "softmax": (jax.grad(lambda x: jax.nn.softmax(x)[0]), ROW),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) / x.std(), X),
    "resize": (lambda x: jax.image.resize(x, (2, 12, 9, 4), "cubic"), X),
    "pooling": (
        lambda x: (
            nn.max_pool(x, (2, 2), (2, 2)),
            nn.pool(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
        ),
        X,
    ),
    "convolution": (
        jax.grad(
            lambda x: jnp.sum(
                lax.conv_general_dilated(
                    x,
                    jnp.ones((3, 3, 4, 5)),
                    (1, 1),
                    "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
            )
        ),
        X,
    ),
    "matmul": (jax.grad(lambda x: jnp.sum((x @ x.swapaxes(-1, -2)) ** 2)), X),
    "cumsum": (lambda x: jnp.cumsum(x, axis=0), X),
}
AS_WINDOWS = ("jax-metal", "cumsum")  # from jax 0.5 on, which no longer knows METAL


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_is_found_in_what_runs(name, target):
    function, argument = HARMLESS[name]
    report = jaxops.audit(function, argument, target=target)
    if (target, name) == AS_WINDOWS and jax.__version_info__ >= (0, 5):
        assert [v.operation for v in report] == ["reduce_window"]
        assert "associative_scan" in report.violations[0].instead
        return
    assert not report, report


def test_a_typed_key_is_only_refused_where_it_becomes_a_custom_call():
    report = jaxops.audit(
        jax.jit(lambda key: jax.random.normal(key, (3,))), jax.random.key(0)
    )
    if jax.__version_info__ < (0, 5):
        assert [v.operation for v in report] == ["custom_call Sharding"]
    else:
        assert not report


def test_what_only_a_plugin_can_lower_is_told_apart():
    matrix = np.eye(3, dtype=np.float32)
    metal = jaxops.audit(jnp.linalg.eigh, matrix)
    assert not metal.ok
    assert "CPU" in str(metal) or "on_cpu" in str(metal)
    for target in ("jax-mps", "metaljax"):
        report = jaxops.audit(jnp.linalg.eigh, matrix, target=target)
        assert report.ok and "eigh" in {c.operation for c in report.cautions}


def test_jitted_static_and_keyword_arguments():
    jitted = jax.jit(lambda x, kind: jnp.fft.fft(x) if kind else x, static_argnums=1)
    assert jaxops.audit(jitted, ROW, False).ok
    assert not jaxops.audit(jitted, ROW, True).ok

    def plain(x, *, name, scale=1.0, nothing=None):
        assert name == "real" and nothing is None
        return x * scale if scale > 1 else jnp.fft.fft(x)

    assert jaxops.audit(plain, ROW, name="real", scale=2.0).ok
    assert not jaxops.audit(
        plain, jax.ShapeDtypeStruct((8,), "float32"), name="real"
    ).ok


def test_a_program_inside_functions_and_regions_is_walked_through():
    inner = jax.jit(jnp.fft.fft)

    def outer(x):
        def body(_, v):
            return lax.cond(v[0] > 0, lambda u: inner(u).real, jnp.cos, v)

        return lax.fori_loop(0, 3, body, x)

    assert "fft" in {v.operation for v in jaxops.audit(outer, ROW)}


def test_the_audit_does_not_name_its_own_lines():
    report = jaxops.audit(jnp.fft.ifftn, ROW)  # traced nowhere else, so not cached
    assert len(report) and {v.line for v in report} == {""}
    assert "(no Python line)  error: fft" in str(report)


def test_an_argument_itself_is_reported():
    report = jaxops.audit(lambda x: x.real, np.ones(3, np.complex64))
    assert "argument" in {v.operation for v in report}


def test_the_report_is_a_text_for_people():
    function, arguments = batch_that_does_not_lead()
    report = jaxops.audit(function, *arguments)
    assert bool(report) and not report.ok and len(list(report)) == len(report) == 1
    text = str(report)
    assert text.startswith("jax-metal 0.1.1: 1 in the way")
    for part in ("error: dot_general", "f32[2,6,8,4]", "jnp.matmul", "issue 20114"):
        assert part in text
    assert max(map(len, text.splitlines())) < 130
    assert report.operations["dot_general"] == 1
    clean = jaxops.audit(jnp.sin, ROW)
    assert not clean and clean.ok and "nothing in the way" in str(clean)


def test_the_table_is_complete():
    for target in TARGETS.values():
        assert target.entries and target.version and target.half
        for entry in target.entries:
            assert entry.effect in EFFECTS
            assert entry.why and entry.instead and entry.source
            assert entry.effect != "slow" or entry.is_caution


def test_large_arrays_are_reported_for_mlx_alone():
    huge = jax.ShapeDtypeStruct((2**16, 2**15), "float32")
    assert not jaxops.audit(jnp.sin, huge, target="jax-mps").ok
    assert jaxops.audit(jnp.sin, huge, target="jax-metal").ok


def test_rbg_keys_give_other_bits_on_jax_mps():
    def draw(data):
        return jax.random.uniform(jax.random.wrap_key_data(data, impl="rbg"), (4,))

    key = np.zeros(4, np.uint32)
    assert "wrong" in {v.effect for v in jaxops.audit(draw, key, target="jax-mps")}


def test_an_unknown_target_is_refused():
    with pytest.raises(
        ValueError, match="one of jax-metal, jax-mps, metaljax; got 'm1'"
    ):
        jaxops.audit(jnp.sin, ROW, target="m1")


def command(*arguments, x64=None):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if x64 is not None:
        environment |= {"JAX_ENABLE_X64": "1", "PYTHONPATH": f"{x64}{os.pathsep}."}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxops.metal.audit", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture
def user_module(monkeypatch):
    module = types.ModuleType("user_module")
    module.spectrum = jnp.fft.fft
    module.add = lambda a, b: a + b
    module.make = lambda: (jnp.sin, (ROW,))
    module.broken = lambda: 1 / 0
    module.number = lambda: 3
    monkeypatch.setitem(sys.modules, "user_module", module)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["user_module:make"], 0, "nothing in the way"),
        (["user_module:add", "--args", "f32[2,3]", "f32[]"], 0, "nothing"),
        (["user_module:spectrum", "--args", "f32[8]"], 1, "has no FFT"),
        (["user_module:spectrum", "--args", "f32[8]", "--target", "jax-mps"], 0, "mps"),
        (["user_module:add", "--args", "f99[2]"], 2, 'like "f32[1,64,64,1]"'),
        (["user_module:number"], 2, "--args"),
        (["user_module:broken"], 2, "ZeroDivisionError"),
        (["user_module:missing"], 2, "cannot be had"),
        (["user_module"], 2, "module:function"),
    ],
)
def test_the_command(user_module, capsys, arguments, code, told):
    assert audit_module.main(arguments) == code
    said = capsys.readouterr()
    assert told in (said.err if code == 2 else said.out)
