"""Training FNOs in JAX: ours against pdequinox's, neojax's and norax's.

    python benchmarks/jax_peers.py [--backend gpu] [--cases 2d-64 ..] [--json FILE]

Peers: ``pip install pdequinox neojax-operators norax`` (norax: Python 3.12 or newer).

Each peer runs with its own architecture: its defaults but for the sizes, a batch by
``jax.vmap`` and its own order of axes, as its readme shows; neojax also in the plain
form, without channel MLP, norm and residual, which is that of norax. Ours has the
arguments that make the same architecture with the same modes; the table counts the
real parameters of both (a complex one is two). What still differs is printed. Most of
it is more work for ours: an ``FNO`` without channel MLP applies the activation twice in
each layer but the last, as neuraloperator does. ``--activation relu`` makes that
once in effect: then ours computes pdequinox's function, and norax's and plain neojax's
but for the activation after the last layer. So the outputs are compared first with
relu, the peer's weights, and a bias that makes this last relu pass everything on; given
is the largest difference in standard deviations of the output.

Both sides are traced, compiled and called by the same lines: the mean squared error,
its gradient and AdamW, with donated state, or a forward pass; float32 with full
products. Each repeat runs both, in one order and the next time in the other. Given are
medians, their quartiles, and the median of the ratios in the same repeat: 2 means that
ours takes half the time; then XLA's temporaries and the seconds to trace and compile.
The freed memory that ``jaxops.select_backend`` keeps for the next call (see
``jaxops.host_memory``) is kept for the whole process: the peers gain from it too.

On a GPU a measurement is the mean of twenty calls in a row, for which it waits once.
"""

import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fno import (  # noqa: E402
    CASES,
    CPU_CASES,
    LEARNING_RATE,
    PASSES,
    Case,
    Stepper,
)
from benchmarks.measuring import (  # noqa: E402
    Call,
    alternate,
    begin,
    parser,
    summary,
    write,
)
from models import FNO  # noqa: E402

N_LAYERS = 4
# The peer's and ours, the same function. The peers' default is gelu in tanh's form.
ACTIVATIONS = {
    "gelu": (jax.nn.gelu, jax.nn.gelu),
    "exact-gelu": (functools.partial(jax.nn.gelu, approximate=False), "gelu"),
    "relu": (jax.nn.relu, "relu"),
}
TWICE = "activation twice in each layer but the last (once with relu)"


def make_pdequinox(case: Case, half, activation, key):
    from pdequinox.arch import ClassicFNO

    return ClassicFNO(
        len(half),
        1,
        1,
        hidden_channels=case.hidden,
        num_modes=half,
        num_blocks=N_LAYERS,
        activation=activation,
        key=key,
    )


def make_neojax(case: Case, half, activation, key, **arguments):
    from neojax.models import FNO as PeerFNO

    return PeerFNO(
        key=key,
        modes=half,
        hidden_channels=case.hidden,
        in_channels=1,
        out_channels=1,
        n_layers=N_LAYERS,
        activation=activation,
        # Its default, True, makes coefficients real before the inverse transform along
        # the other axes, which is another function.
        enforce_hermitian_symmetry=False,
        **arguments,
    )


def make_norax(case: Case, half, activation, key):
    from norax.models import FNO as PeerFNO

    return PeerFNO(
        key,
        channels_in=1,
        channels_out=1,
        n_modes=half,
        width=case.hidden,
        depth=N_LAYERS,
        activation=activation,
    )


def dense(weight, bias) -> dict[str, Any]:
    """Our layer with a weight (out, in, ..) and a bias of any shape."""
    return {"kernel": weight.reshape(weight.shape[:2]).T, "bias": bias.reshape(-1)}


def layer(spectral, weight, bias) -> dict[str, Any]:
    """Our Fourier layer, of a complex spectral weight (out, in, *rows) whose rows are
    ordered by wavenumber. The bias of the peer's skip is that of our convolution."""
    spectral = jnp.moveaxis(spectral, (0, 1), (-1, -2))
    both = jnp.stack([spectral.real, spectral.imag])
    skip = dense(weight, bias)
    return {
        "conv": {"weight": both, "bias": skip["bias"]},
        "fno_skip": {"kernel": skip["kernel"]},
    }


def joined(corners, first_axis_first: bool):
    """One weight of those of the spectrum's corners, each (out, in, *modes).

    Corners are counted in binary, 1 for the negative wavenumbers of an axis, the first
    axis being the lowest digit (``first_axis_first``) or the highest.
    """
    n_axes = corners[0].ndim - 3  # the last one has no negative wavenumbers
    blocks = dict(zip(itertools.product((0, 1), repeat=n_axes), corners, strict=True))

    def join(done: tuple[int, ...]):
        if len(done) == n_axes:
            return blocks[done[::-1] if first_axis_first else done]
        return jnp.concatenate([join((*done, 1)), join((*done, 0))], 2 + len(done))

    return join(())


def from_pdequinox(peer) -> dict[str, Any]:
    lifting, last = peer.lifting, peer.projection
    hidden = last.weight.shape[1]
    weights = {
        "lifting": {"fcs_0": dense(lifting.weight, lifting.bias)},
        "projection": {
            "fcs_0": dense(jnp.eye(hidden), jnp.zeros(hidden)),
            "fcs_1": dense(last.weight, last.bias),
        },
    }
    for i, block in enumerate(peer.blocks):
        conv, skip = block.spectral_conv, block.by_pass_conv
        spectral = joined(conv.weights_real + 1j * conv.weights_imag, True)
        weights[f"blocks_{i}"] = layer(spectral, skip.weight, skip.bias)
    return weights


def from_neojax(peer) -> dict[str, Any]:
    weights = {}
    for name, mlp in (("lifting", peer.lifting), ("projection", peer.projection)):
        pairs = zip(mlp.weights, mlp.biases, strict=True)
        weights[name] = {f"fcs_{i}": dense(*pair) for i, pair in enumerate(pairs)}
    for i, block in enumerate(peer.fno_blocks.fno_layers):
        spectral = joined(block.spectral_conv.weights.weights, True)
        skip = block.local_operator.conv
        weights[f"blocks_{i}"] = layer(spectral, skip.weight, skip.bias)
    return weights


def from_norax(peer) -> dict[str, Any]:
    weights = {}
    for name, mlp in (("lifting", peer.lift), ("projection", peer.project)):
        layers = (*mlp.hidden_layers, mlp.output_layer)
        weights[name] = {
            f"fcs_{i}": dense(own.weight, own.bias) for i, own in enumerate(layers)
        }
    for i, block in enumerate(peer.fourier_layers):
        conv = block.spectral
        spectral = conv.weights_re + 1j * conv.weights_im
        spectral = jnp.fft.fftshift(spectral, range(2, spectral.ndim - 1))
        weights[f"blocks_{i}"] = layer(spectral, block.linear.weight, block.linear.bias)
    return weights


class Peer(NamedTuple):
    """One peer and how ours becomes it.

    Attributes:
        package: on the package index; the module has the first part of its name.
        make: the peer, of a case, its modes, the activation and a key.
        channels_first: its order of axes, in one sample.
        ours: arguments of :class:`models.FNO`.
        differs: what is more in ours than in the peer.
        weights: ours, of the peer's; None where it is another function.
        last_bias: of the peer's last Fourier layer, where the peer has an activation
            after it and ours has none.
    """

    package: str
    make: Callable
    channels_first: bool
    ours: dict[str, Any]
    differs: str
    weights: Callable | None = None
    last_bias: Callable | None = None


PEERS = {
    "pdequinox": Peer(
        "pdequinox",
        make_pdequinox,
        True,
        {
            "use_channel_mlp": False,
            "lifting_channel_ratio": 0,
            "projection_channel_ratio": 1,
        },
        f"{TWICE}; a 1x1 layer (the identity, with its weights) before the last",
        from_pdequinox,
    ),
    "norax": Peer(
        "norax",
        make_norax,
        False,
        {"use_channel_mlp": False},
        f"{TWICE}, but none after the last",
        from_norax,
        lambda peer: peer.fourier_layers[-1].linear.bias,
    ),
    "neojax": Peer(
        "neojax-operators",
        make_neojax,
        True,
        {"norm": "group_norm"},
        "a second norm, and the activation after the channel MLP too; the skip of the "
        "channel MLP starts before the convolution; its activation is the exact gelu; "
        "no skip around the convolution's activation",
    ),
    "neojax plain": Peer(
        "neojax-operators",
        functools.partial(
            make_neojax,
            use_channel_mlp=False,
            normalization=None,
            use_fno_residual=False,
            use_local_operator_bias=True,
        ),
        True,
        {"use_channel_mlp": False},
        f"{TWICE}, but none after the last",
        from_neojax,
        lambda peer: peer.fno_blocks.fno_layers[-1].local_operator.conv.bias,
    ),
}


def make_both(case: Case, peer: Peer, activation: str):
    """The peer's module, with weights, and our model, without.

    The peers count modes on one side; ours keeps as many as they do: of 16, -8..7, and
    on the last axis 0..7.
    """
    half = tuple(n // 2 for n in case.modes)
    theirs, ours = ACTIVATIONS[activation]
    module = peer.make(case, half, theirs, jax.random.key(0))
    model = FNO(
        n_modes=(*(2 * n for n in half[:-1]), 2 * half[-1] - 1),
        in_channels=1,
        out_channels=1,
        hidden_channels=case.hidden,
        n_layers=N_LAYERS,
        positional_embedding=None,
        non_linearity=ours,
        **peer.ours,
    )
    return module, model


def split(module) -> tuple[Any, Callable]:
    """An Equinox module's parameters, and the function of them and of a batch."""
    import equinox as eqx

    parameters, rest = eqx.partition(module, eqx.is_inexact_array)
    return parameters, lambda own, x: jax.vmap(eqx.combine(own, rest))(x)


def n_real(parameters) -> int:
    return sum(
        leaf.size * (2 if jnp.iscomplexobj(leaf) else 1)
        for leaf in jax.tree.leaves(parameters)
    )


def difference(case: Case, peer: Peer) -> float | None:
    """The largest difference of the outputs with relu and the same random weights.

    In standard deviations of the output over one sample. Where the peer has one more
    activation, a bias is so large that relu passes everything on.
    """
    if peer.weights is None:
        return None
    import equinox as eqx

    module, model = make_both(case, peer, "relu")
    parameters, _ = eqx.partition(module, eqx.is_inexact_array)
    leaves, form = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [  # biases and small spectral weights are to count too
        leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    module = eqx.combine(jax.tree.unflatten(form, leaves), module)
    if peer.last_bias is not None:
        module = eqx.tree_at(peer.last_bias, module, replace_fn=lambda bias: bias + 20)
    parameters, function = split(module)
    x = jax.random.normal(jax.random.key(2), (1, *case.grid, 1))
    with jax.default_matmul_precision("highest"):
        theirs = jax.jit(function)(parameters, as_peer(x, peer))
        found = jax.jit(model.apply)({"params": peer.weights(module)}, x)
    error = jnp.abs(as_peer(found, peer) - theirs).max() / jnp.std(theirs)
    return float(error)


def as_peer(x, peer: Peer):
    return jnp.moveaxis(x, -1, 1) if peer.channels_first else x


class Contender(NamedTuple):
    call: Call
    compile_s: float
    temporaries: int | None  # bytes


def make_contender(name: str, apply, parameters, x, y) -> Contender:
    optimizer = optax.adamw(LEARNING_RATE)

    # Complex weights (neojax) get JAX's gradient unconjugated, as its own trainer does.
    def step(carry, x, y):
        parameters, state = carry

        def loss(parameters):
            return jnp.mean(jnp.square(apply(parameters, x) - y))

        value, gradient = jax.value_and_grad(loss)(parameters)
        changes, state = optimizer.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, changes), state), value

    own = jax.tree.map(jnp.array, parameters)
    start = time.perf_counter()
    with jax.default_matmul_precision("highest"):
        if name == "forward":
            program = jax.jit(apply).lower(own, x).compile()
            run = functools.partial(program, own, x)
        else:
            carry = (own, optimizer.init(own))
            program = jax.jit(step, donate_argnums=0).lower(carry, x, y).compile()
            run = Stepper(program, carry, (x, y))
    seconds = time.perf_counter() - start
    analysis = program.memory_analysis()
    size = None if analysis is None else analysis.temp_size_in_bytes
    return Contender((run, jax.block_until_ready), seconds, size)


def measure(key: str, name: str, peer_name: str, options) -> dict[str, Any]:
    """One row: a peer and ours in one case and pass, printed and returned."""
    case, peer = CASES[key], PEERS[peer_name]
    on_gpu = jax.default_backend() == "gpu"
    batch = case.gpu_batch if on_gpu else case.batch
    rng = np.random.default_rng(0)
    x, y = (
        jnp.asarray(rng.standard_normal((batch, *case.grid, 1), dtype=np.float32))
        for _ in range(2)
    )
    module, model = make_both(case, peer, options.activation)
    parameters, function = split(module)
    variables = jax.jit(model.init)(jax.random.key(0), x[:1])
    contenders = {
        "ours": make_contender(name, model.apply, variables, x, y),
        "peer": make_contender(
            name, function, parameters, as_peer(x, peer), as_peer(y, peer)
        ),
    }
    calls = {side: contender.call for side, contender in contenders.items()}
    results = summary(alternate(calls, options.repeats, 20 if on_gpu else 1), "ours")
    counts = {"ours": n_real(variables), "peer": n_real(parameters)}
    for side in ("peer", "ours"):
        result, contender = results[side], contenders[side]
        result["parameters"] = counts[side]
        result["compile_s"] = contender.compile_s
        result["temporaries_bytes"] = contender.temporaries
        size = contender.temporaries
        print(
            f"{peer_name if side == 'peer' else '  ours':16}{counts[side]:>12}"
            f"{result['median_ms']:10.2f}"
            f"{'{:.2f} - {:.2f}'.format(*result['quartiles_ms']):>20}"
            f"{result['ratio']:8.2f}"
            f"{'-' if size is None else f'{size / 1e6:.0f}':>8}"
            f"{contender.compile_s:10.1f}",
            flush=True,
        )
    row = {"case": key, "sizes": case._asdict(), "pass": name, "peer": peer_name}
    return {**row, "activation": options.activation, "results": results}


def installed(names) -> list[str]:
    """Those of the peers that can be imported; of others, why not."""
    found = []
    for name in names:
        try:
            importlib.import_module(PEERS[name].package.partition("-")[0])
            found.append(name)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    made.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    made.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    made.add_argument("--activation", choices=ACTIVATIONS, default="gelu")
    options = made.parse_args()
    peers = installed(options.peers)
    if not peers:
        raise SystemExit("None of these peers is installed.")
    packages = sorted({peer.package for peer in PEERS.values()})
    record = begin(options, "equinox", "optax", *packages)
    record |= {"differs": {}, "outputs": {}}
    print("\nin ours, compared with")
    for name in peers:
        record["differs"][name] = PEERS[name].differs
        print(f"  {name}: {PEERS[name].differs}")
    on_gpu = record["platform"] == "gpu"
    for key in options.cases or (CASES if on_gpu else CPU_CASES):
        print(f"\n{key} {CASES[key]}")
        for name in peers:
            error = difference(CASES[key], PEERS[name])
            record["outputs"][f"{key} {name}"] = error
            told = "another function" if error is None else f"differs by {error:.1e}"
            print(f"  relu and the weights of {name}: {told}", flush=True)
        for name in options.passes:
            print(f"\n{key}, {name}, {options.activation}")
            print(
                f"{'':16}{'parameters':>12}{'median ms':>10}{'quartiles':>20}"
                f"{'/ ours':>8}{'temp MB':>8}{'compile s':>10}"
            )
            for peer in peers:
                record["rows"].append(measure(key, name, peer, options))
                write(record, options.json)  # of all rows so far
                jax.clear_caches()


if __name__ == "__main__":
    main()
