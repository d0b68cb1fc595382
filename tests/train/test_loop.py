"""The training loop: what a step does, the order of the data, stopping and going on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxops.backend import to_device
from jaxops.device import trace_for
from models import FNO
from train import loop, losses
from train.normalise import UnitGaussian

NUM_SAMPLES, BATCH = 22, 4  # five batches an epoch, two samples left over
SEED = 5
RATE = 5e-2
pytestmark = pytest.mark.usefixtures("quick_compilation")


def smoothing_set(num_samples=NUM_SAMPLES, seed=0):
    """Random fields on 8 points, and their moving averages, scaled and shifted."""
    inputs = np.random.default_rng(seed).normal(size=(num_samples, 8, 1))
    targets = 30 + 10 * (np.roll(inputs, 1, 1) + inputs + np.roll(inputs, -1, 1))
    return inputs.astype(np.float32), targets.astype(np.float32)


def noisy_model(dropout):
    """With all that a step keeps beside the weights: statistics, and dropout's key."""
    return FNO(
        n_modes=(6,),
        in_channels=1,
        out_channels=1,
        hidden_channels=4,
        n_layers=1,
        norm="batch_norm",
        channel_mlp_dropout=dropout,
    )


def make(epochs=3):
    """A model on that set: (state, jitted train step, forward)."""
    inputs, targets = smoothing_set()
    model = noisy_model(0.1)
    forward = loop.make_forward(
        model, UnitGaussian.fit(inputs), UnitGaussian.fit(targets)
    )
    num_steps = epochs * (NUM_SAMPLES // BATCH)
    optimizer = loop.make_optimizer(RATE, num_steps, gradient_clip=1.0)
    step = loop.make_train_step(forward, optimizer, losses.relative_l2)
    state = loop.create_state(model, optimizer, inputs.shape, seed=1)
    return state, loop.compile_train_step(step), forward


def run(state, step, epochs=3, **options):
    """All that is handed over, fetched: the next step takes a state's memory."""
    batches = loop.shuffled_batches(*smoothing_set(), BATCH, SEED)
    passes = loop.train_epochs(state, step, *batches, epochs=epochs, **options)
    return [p._replace(state=jax.device_get(p.state)) for p in passes]


def on_device(state):
    """A state that was fetched, as a checkpoint brings it back."""
    return jax.tree.map(lambda leaf: jnp.copy(to_device(leaf, dtype=leaf.dtype)), state)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def trained():
    """Step, forward, and all that a run of three epochs hands over, on the host."""
    state, step, forward = make()
    fresh = jax.device_get(state)
    return step, forward, fresh, run(state, step)


def whole_and_parts(model, micro_batch):
    """States after one step on the same batch, at once and in parts; the compiled
    steps."""
    inputs, targets = smoothing_set(BATCH)
    optimizer = loop.make_optimizer(RATE, 5)
    forward = loop.make_forward(
        model, UnitGaussian.fit(inputs), UnitGaussian.fit(targets)
    )
    fresh = loop.create_state(model, optimizer, inputs.shape, seed=1)
    batch = jnp.asarray(inputs), jnp.asarray(targets)
    steps = [
        jax.jit(loop.make_train_step(forward, optimizer, losses.relative_l2, size))
        .lower(fresh, batch)
        .compile()
        for size in (None, micro_batch)
    ]
    return [step(fresh, batch) for step in steps], steps


@pytest.mark.parametrize(
    ("grid", "batch", "expected"),
    [
        ((128, 128), 8, 4),  # 32 MiB of 64 channels: two parts
        ((128, 128), 32, 4),
        ((128, 128), 6, 3),
        ((128, 128), 7, None),  # single samples, of 4 MiB, would cost time
        ((64, 64), 16, None),  # 16 MiB as they are
        ((64, 64, 64), 4, 1),  # 64 MiB a sample
        ((512, 512), 1, None),
    ],
)
def test_a_cpu_takes_batches_in_parts_that_fit_its_cache(grid, batch, expected):
    options = {"n_modes": (4,) * len(grid), "in_channels": 1, "out_channels": 1}
    model = FNO(**options, hidden_channels=64)
    shape = (batch, *grid, 1)
    with trace_for("cpu"):
        assert loop.default_micro_batch(model, shape) == expected
        for other in ({"norm": "batch_norm"}, {"channel_mlp_dropout": 0.1}):
            changed = FNO(**options, hidden_channels=64, **other)
            assert loop.default_micro_batch(changed, shape) is None
    with trace_for("gpu"):
        assert loop.default_micro_batch(model, shape) is None


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_parts_of_a_batch_make_the_step_of_the_batch(micro_batch):
    model = FNO(
        n_modes=(6,), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2
    )
    (whole, parts), steps = whole_and_parts(model, micro_batch)
    for name in whole[1]:
        np.testing.assert_allclose(whole[1][name], parts[1][name], rtol=1e-5)
    # Adam's first step is the gradient's sign: its first moment is the gradient.
    expected, found = (state.opt_state[0].mu for state, _ in (whole, parts))
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale),
        expected,
        found,
    )
    sizes = [step.memory_analysis().temp_size_in_bytes for step in steps]
    assert sizes[1] < sizes[0]


def test_parts_have_their_own_dropout_and_statistics():
    model = noisy_model(0.5)
    (_, (after, metrics)), _ = whole_and_parts(model, 2)
    assert np.isfinite(metrics["loss"])
    means = [leaf for leaf in jax.tree.leaves(after.batch_stats) if leaf.ndim]
    assert any(np.abs(leaf).max() > 0 for leaf in means)


def test_one_step_changes_what_it_should(trained):
    step, _, before, _ = trained
    batch = tuple(jnp.asarray(a[:BATCH]) for a in smoothing_set())
    after, metrics = jax.device_get(step(on_device(before), batch))
    assert after.step == 1
    assert after.bad_step == -1
    assert metrics["loss"] == after.loss_sum > 0
    assert metrics["gradient_norm"] > 0
    assert set(after.variables) == {"params", "batch_stats"}
    for tree in ("params", "batch_stats", "opt_state"):
        pairs = zip(
            jax.tree.leaves(getattr(before, tree)),
            jax.tree.leaves(getattr(after, tree)),
            strict=True,
        )
        changed = [not np.array_equal(a, b) for a, b in pairs]
        assert all(changed), tree
    assert_same(before.rng, after.rng)


class Line(nn.Module):
    """y = a x + b."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1, bias_init=nn.initializers.ones)(x)


def test_step_is_plain_adamw_on_the_loss():
    """The textbook's first step, with the gradient by hand."""
    model = Line()
    optimizer = loop.make_optimizer(RATE, 20, weight_decay=0.1)
    forward = loop.make_forward(model, None, None)
    step = jax.jit(loop.make_train_step(forward, optimizer, losses.relative_l2))
    inputs, targets = (a[:BATCH] for a in smoothing_set())
    state = loop.create_state(model, optimizer, inputs.shape, seed=0)
    after, metrics = jax.device_get(step(state, (inputs, targets)))

    a, b = np.float64(state.params["Dense_0"]["kernel"][0, 0]), 1.0
    error = a * inputs + b - targets
    size = np.linalg.norm(targets, axis=1) * np.linalg.norm(error, axis=1)
    slopes = [(error * inputs).sum(1) / size, error.sum(1) / size]
    slopes = [slope.mean() for slope in slopes]
    np.testing.assert_allclose(metrics["gradient_norm"], np.hypot(*slopes), rtol=1e-5)
    # Adam's first change is the sign of the gradient. 20 steps, 5% of them warm-up: the
    # first one at half the rate.
    for name, old, slope in (("kernel", a, slopes[0]), ("bias", b, slopes[1])):
        new = old - RATE / 2 * (np.sign(slope) + 0.1 * old)
        np.testing.assert_allclose(after.params["Dense_0"][name].item(), new, rtol=1e-5)


def test_loss_falls_and_epochs_are_told(trained):
    _, _, _, passes = trained
    assert [(epoch, done, whole) for _, epoch, done, whole, _ in passes] == [
        (1, 5, True),
        (2, 5, True),
        (3, 5, True),
    ]
    first, last = passes[0].loss, passes[-1].loss
    assert last < 0.75 * first
    np.testing.assert_allclose(last, passes[-1].state.loss_sum / 5, rtol=1e-6)


def test_dropout_and_statistics_are_for_training_only(trained):
    _, forward, _, passes = trained
    variables, (inputs, _) = passes[-1].state.variables, smoothing_set()
    inputs = jnp.asarray(inputs)
    outputs, updates = jax.jit(forward)(variables, inputs)
    assert updates == {}
    assert_same(outputs, jax.jit(forward)(variables, inputs)[0])


@pytest.mark.parametrize("stop_after", [1, 5, 7])
def test_stopping_and_going_on_gives_the_same_bits(trained, stop_after):
    step, _, fresh, passes = trained
    asked = iter(range(1, 100))
    stopped = next(
        p
        for p in loop.train_epochs(
            on_device(fresh),
            step,
            *loop.shuffled_batches(*smoothing_set(), BATCH, SEED),
            epochs=3,
            should_stop=lambda: next(asked) >= stop_after,
        )
        if p.complete is False or stop_after == 5
    )
    assert int(stopped.state.step) == stop_after
    # Once around through the host, as a checkpoint does.
    state = on_device(jax.device_get(stopped.state))
    rest = run(state, step)
    assert_same(rest[-1].state, passes[-1].state)
    assert [p.loss for p in rest] == [p.loss for p in passes[-len(rest) :]]


def test_pauses_hand_over_and_change_nothing(trained):
    step, _, fresh, passes = trained
    handed = run(on_device(fresh), step, epochs=1, pause_seconds=0.0)
    assert [p.batches for p in handed] == [1, 2, 3, 4, 5]
    assert [p.complete for p in handed] == [False] * 4 + [True]
    assert handed[-1].loss == passes[0].loss


def test_a_finished_state_has_nothing_left(trained):
    step, _, _, passes = trained
    assert run(on_device(passes[-1].state), step) == []


def test_order_is_a_new_permutation_each_epoch():
    orders = [loop.epoch_order(50, 3, epoch) for epoch in range(2)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(50))
    assert (orders[0] != orders[1]).any()
    assert (loop.epoch_order(50, 4, 0) != orders[0]).any()
    np.testing.assert_array_equal(loop.epoch_order(50, 3, 0), orders[0])


def test_one_trace_and_few_looks_at_the_loss():
    looks, traces = [], []

    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            if train:
                traces.append(x.shape)
            return x * self.param("scale", nn.initializers.ones, (1, 1, 1))

    model = Scale()
    optimizer = loop.make_optimizer(1e-2, 100)
    step = loop.compile_train_step(
        loop.make_train_step(
            loop.make_forward(model, None, None), optimizer, losses.relative_l2
        )
    )
    inputs, _ = smoothing_set()
    state = loop.create_state(model, optimizer, inputs.shape, 0)
    list(
        loop.train_epochs(
            state,
            step,
            *loop.shuffled_batches(inputs, 2 * inputs, BATCH, 0),
            epochs=4,
            on_step=lambda epoch, done, loss: looks.append((epoch, done, loss)),
        )
    )
    assert traces == [(BATCH, 8, 1)]
    assert [look[:2] for look in looks] == [
        (e, b) for e in (1, 2, 3, 4) for b in range(1, 6)
    ]
    # At each epoch's end, and after the first step, whose compilation took a while.
    assert 4 <= sum(look[2] is not None for look in looks) <= 6


def test_a_loss_that_is_not_finite_stops_with_the_step(trained):
    step, _, fresh, _ = trained
    inputs, targets = smoothing_set()
    # A sample that the first epoch leaves over, and the second one has in some batch.
    orders = [list(loop.epoch_order(NUM_SAMPLES, SEED, epoch)) for epoch in (0, 1)]
    spoilt = orders[0][-1]
    bad_step = 5 + orders[1].index(spoilt) // BATCH + 1
    targets[spoilt, 3] = np.nan
    batches = loop.shuffled_batches(inputs, targets, BATCH, SEED)
    passes = loop.train_epochs(on_device(fresh), step, *batches, epochs=3)
    assert next(passes).complete
    with pytest.raises(loop.NonFiniteLossError, match=f"step {bad_step}, in epoch 2"):
        next(passes)


def test_too_few_samples_for_a_batch():
    with pytest.raises(ValueError, match="needs 4 samples .* has 3"):
        loop.shuffled_batches(*smoothing_set(3), 4, 0)


@pytest.mark.parametrize(
    ("num_steps", "warmup", "rates"),
    [
        (100, 0.1, {0: 1 / 11, 10: 1.0, 55: 0.5, 100: 0.0}),
        (100, 0.0, {0: 1.0, 50: 0.5, 100: 0.0}),
        (1, 0.5, {0: 1.0}),
    ],
)
def test_learning_rate_rises_and_falls(monkeypatch, num_steps, warmup, rates):
    schedules = []
    monkeypatch.setattr(
        optax, "adamw", lambda schedule, weight_decay: schedules.append(schedule)
    )
    loop.make_optimizer(3.0, num_steps, warmup=warmup)
    for step, rate in rates.items():
        np.testing.assert_allclose(schedules[0](step), 3.0 * rate, atol=1e-6)
