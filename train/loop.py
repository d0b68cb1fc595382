"""The training loop: a pure step on the device, batches and their order on the host.

The order of the samples depends on (seed, epoch) alone, and all else that a step needs
is in `TrainState`. So a run that goes on from a saved state, even from the middle of an
epoch, makes the same numbers as one that never stopped.

Batches are cut on the host and sent one by one. On a CPU that was as fast as gathering
from a copy of the set on the device (0.1 ms a batch of 32 fields of 64x64), sets larger
than the device's memory need no second way, and Metal is spared large gathers.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxops.backend import to_device
from jaxops.device import device_kind

TICK_SECONDS = 0.5  # between looks at the loss; each look waits for the device
PART_BYTES = 8 * 2**20, 20 * 2**20  # of a hidden field: fewer, and parts cost time
KEY = "threefry2x32"  # the generator that gives the same bits on every backend


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite."""


@flax.struct.dataclass
class TrainState:
    """All that a training step reads and changes.

    Attributes:
        step: int32, steps made so far.
        params: the weights.
        batch_stats: running statistics of batch_norm, or an empty dict.
        opt_state: the optimiser's state.
        rng: uint32 (2,), the dropout key; each step folds its number into it.
        loss_sum: float32, the sum of this epoch's losses.
        bad_step: int32, the first step whose loss or gradient was not finite, or -1.
    """

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: Any
    rng: jax.Array
    loss_sum: jax.Array
    bad_step: jax.Array

    @property
    def variables(self) -> dict[str, Any]:
        """What ``model.apply`` takes."""
        if self.batch_stats:
            return {"params": self.params, "batch_stats": self.batch_stats}
        return {"params": self.params}


class Progress(NamedTuple):
    """Where training stands when `train_epochs` hands over.

    Attributes:
        state: the state after ``batches`` batches of the epoch.
        epoch: the epoch, from 1.
        batches: batches of this epoch that are done.
        complete: whether the epoch is over.
        loss: mean loss of those batches.
    """

    state: TrainState
    epoch: int
    batches: int
    complete: bool
    loss: float


def make_forward(model: Any, input_normaliser: Any, target_normaliser: Any) -> Callable:
    """``forward(variables, inputs, **options) -> (outputs, updates)``, physical units.

    Inputs (batch, *grid, in_channels) are encoded, the model applied, and its outputs
    (batch, *grid, out_channels) decoded; without a normaliser (None) they are what the
    model takes and gives. ``options`` go to ``model.apply``; ``updates``
    holds the collections named by ``mutable``.
    """

    def forward(variables, inputs, **options):
        if input_normaliser is not None:
            inputs = input_normaliser.encode(inputs)
        result = model.apply(variables, inputs, **options)
        outputs, updates = result if "mutable" in options else (result, {})
        if target_normaliser is not None:
            outputs = target_normaliser.decode(outputs)
        return outputs, updates

    return forward


def make_optimizer(
    learning_rate: float,
    num_steps: int,
    weight_decay: float = 1e-4,
    warmup: float = 0.05,
    gradient_clip: float | None = None,
) -> optax.GradientTransformation:
    """AdamW with a linear warm-up, then a cosine down to zero.

    Args:
        learning_rate: its highest value.
        num_steps: steps of the whole run, after which the rate is zero.
        weight_decay: decoupled decay of all weights.
        warmup: fraction of the steps that the rise takes.
        gradient_clip: largest global norm of the gradient; None leaves it alone.
    """
    num_warmup = min(round(warmup * num_steps), num_steps - 1)
    if num_warmup > 0:
        # From one part of the rise, not from zero: no step is for nothing.
        schedule = optax.warmup_cosine_decay_schedule(
            learning_rate / (num_warmup + 1), learning_rate, num_warmup, num_steps
        )
    else:
        schedule = optax.cosine_decay_schedule(learning_rate, num_steps)
    optimizer = optax.adamw(schedule, weight_decay=weight_decay)
    if gradient_clip is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(gradient_clip), optimizer)


def create_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    input_shape: tuple[int, ...],
    seed: int,
) -> TrainState:
    """Fresh weights and optimiser state.

    Args:
        model: a linen module.
        optimizer: see `make_optimizer`.
        input_shape: (batch, *grid, in_channels) of a batch.
        seed: of weights and dropout.
    """
    init_key, dropout_key = jax.random.split(jax.random.key(seed, impl=KEY))
    sample = jnp.zeros((1, *input_shape[1:]), jnp.float32)

    # Raw key data goes in: as an argument, a typed key lowers to a sharding annotation
    # on jax 0.4, and Apple's own plugin takes none.
    def init(key_data, sample):
        return model.init(jax.random.wrap_key_data(key_data, impl=KEY), sample)

    variables = jax.jit(init)(jax.random.key_data(init_key), sample)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        opt_state=optimizer.init(variables["params"]),
        rng=jax.random.key_data(dropout_key),
        loss_sum=jnp.zeros((), jnp.float32),
        bad_step=jnp.full((), -1, jnp.int32),
    )


def default_micro_batch(model: Any, input_shape: tuple[int, ...]) -> int | None:
    """The ``micro_batch`` of `make_train_step` for an FNO where nobody chose one.

    On a CPU a batch whose fields do not fit its cache is computed in parts that do: in
    two, an FNO of 64 channels on 8 x 128 x 128 points takes 0.57 of the memory and 1.00
    to 1.02 of the time. None, all at once, elsewhere, and for batch norm and dropout,
    which parts would change.

    Args:
        model: a `models.FNO`.
        input_shape: (batch, *grid, in_channels).
    """
    batch, *grid, _ = input_shape
    sample = 4 * math.prod(grid) * model.hidden_channels
    changes = model.norm == "batch_norm" or model.channel_mlp_dropout > 0
    if device_kind() != "cpu" or changes or batch * sample <= PART_BYTES[1]:
        return None
    least, most = PART_BYTES[0], max(PART_BYTES[1], sample)
    sizes = [n for n in range(1, batch) if batch % n == 0]
    fitting = [n for n in sizes if least <= n * sample <= most]
    return max(fitting, default=None)


def make_train_step(
    forward: Callable,
    optimizer: optax.GradientTransformation,
    loss: Callable,
    micro_batch: int | None = None,
) -> Callable:
    """The pure ``train_step(state, (inputs, targets)) -> (state, metrics)``.

    Args:
        forward: see `make_forward`.
        optimizer: see `make_optimizer`.
        loss: ``(prediction, target) -> scalar``, the mean over samples, as in
            `train.losses`.
        micro_batch: samples that are computed at a time; the losses and gradients of
            these parts are averaged, so that memory is needed for one part. It divides
            the batch. None: all at once. Batch norm takes its statistics of each part.

    ``metrics`` holds the scalars "loss" and "gradient_norm" of the batch, before the
    update. Jit it once, with `compile_train_step`.
    """

    def objective(params, batch_stats, state, batch, key):
        inputs, targets = batch
        prediction, updates = forward(
            state.replace(params=params, batch_stats=batch_stats).variables,
            inputs,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return loss(prediction, targets), updates.get("batch_stats", batch_stats)

    differentiate = jax.value_and_grad(objective, has_aux=True)

    def in_parts(state, batch, key):
        """What ``differentiate`` gives, part by part."""

        def work(batch_stats, part, number):
            (value, batch_stats), gradient = differentiate(
                state.params, batch_stats, state, part, jax.random.fold_in(key, number)
            )
            return (value, gradient), batch_stats

        (value, gradient), batch_stats = mean_of_parts(
            work, state.batch_stats, batch, micro_batch
        )
        return (value, batch_stats), gradient

    def train_step(state, batch):
        key = jax.random.wrap_key_data(state.rng, impl=KEY)
        key = jax.random.fold_in(key, state.step)
        if micro_batch is None or micro_batch == len(batch[0]):
            (value, batch_stats), gradient = differentiate(
                state.params, state.batch_stats, state, batch, key
            )
        else:
            (value, batch_stats), gradient = in_parts(state, batch, key)
        squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)]
        norm = jnp.sqrt(sum(squares))
        with jax.numpy_dtype_promotion("standard"):  # optax has float ** int32
            changes, opt_state = optimizer.update(
                gradient, state.opt_state, state.params
            )
        is_good = jnp.isfinite(value) & jnp.isfinite(norm)
        first_bad = jnp.where(state.bad_step < 0, state.step, state.bad_step)
        state = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, changes),
            batch_stats=batch_stats,
            opt_state=opt_state,
            loss_sum=state.loss_sum + value,
            bad_step=jnp.where(is_good, state.bad_step, first_bad),
        )
        return state, {"loss": value, "gradient_norm": norm}

    return train_step


def mean_of_parts(
    work: Callable, carry: Any, batch: Sequence[jax.Array], size: int
) -> tuple[Any, Any]:
    """The mean of what ``work`` finds in parts of ``size`` samples, one after another.

    Args:
        work: ``(carry, part, number) -> (found, carry)``; what it finds are floats.
        carry: what the first part gets, and the next one from it.
        batch: arrays of (samples, ...); ``size`` divides the samples.
    """
    count = len(batch[0]) // size
    parts = [a.reshape(count, size, *a.shape[1:]) for a in batch]
    first = [part[0] for part in parts], jnp.zeros((), jnp.int32)
    shapes, _ = jax.eval_shape(work, carry, *first)

    def add(state, numbered):
        total, carry = state
        number, *part = numbered
        found, carry = work(carry, part, number)
        total = jax.tree.map(lambda a, b: a + b / count, total, found)
        return (total, carry), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    numbers = jnp.arange(count, dtype=jnp.int32)
    (total, carry), _ = jax.lax.scan(add, (zeros, carry), (numbers, *parts))
    return total, carry


def compile_train_step(train_step: Callable) -> Callable:
    """Jit a train step; where the platform can, the new state takes the old's memory.

    The old state is then gone: keep none. Apple's plugins ignore donation, with a
    warning at each call, so they are not asked.
    """
    can_donate = jax.default_backend() in ("cpu", "gpu", "cuda", "rocm")
    return jax.jit(train_step, donate_argnums=(0,) if can_donate else ())


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples of an epoch in their order: a permutation (num_samples,)."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_samples)


def shuffled_batches(
    inputs: np.ndarray, targets: np.ndarray, batch_size: int, seed: int
) -> tuple[Callable[[int, int], tuple[np.ndarray, np.ndarray]], int]:
    """Batches of a set, in another order each epoch.

    An epoch has ``n // batch_size`` batches; the samples that are left over differ from
    epoch to epoch.

    Args:
        inputs: (n, *grid, in_channels) on the host, in physical units.
        targets: (n, *grid, out_channels).
        batch_size: samples a step.
        seed: of the order.

    Returns:
        ``draw(epoch, batch) -> (inputs, targets)``, and the batches an epoch has, both
        as `train_epochs` takes them.

    Raises:
        ValueError: if there are fewer samples than ``batch_size``.
    """
    num_samples = len(inputs)
    if num_samples < batch_size:
        raise ValueError(
            f"A batch needs {batch_size} samples and the training set has "
            f"{num_samples}. Choose a smaller batch size."
        )
    order = functools.lru_cache(maxsize=1)(
        functools.partial(epoch_order, num_samples, seed)
    )

    def draw(epoch, batch):
        rows = order(epoch)[batch * batch_size : (batch + 1) * batch_size]
        return inputs[rows], targets[rows]

    return draw, num_samples // batch_size


def train_epochs(
    state: TrainState,
    train_step: Callable,
    draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
    num_batches: int,
    *,
    epochs: int,
    on_step: Callable[[int, int, float | None], None] = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
    pause_seconds: float = float("inf"),
) -> Iterator[Progress]:
    """Train until ``epochs`` epochs are complete, from wherever the state stands.

    Hands over a `Progress` after each epoch, and in the middle of one
    when ``should_stop()`` or when ``pause_seconds`` went by since the last time. The
    caller may save the state, and stop, or go on by asking for the next one.

    Args:
        state: see `create_state`, or a restored one.
        train_step: see `compile_train_step`.
        draw: ``draw(epoch, batch)``, both from 0: the inputs and targets of a batch, on
            the host; they depend on nothing else. See `shuffled_batches`.
        num_batches: batches an epoch.
        epochs: of the whole run.
        on_step: called after each step with the epoch from 1, the number of batches
            done in it, and their mean loss or (mostly) None: the device works behind.
        should_stop: looked at after each step.
        pause_seconds: longest time between two handings over.

    Raises:
        NonFiniteLossError: if a loss or gradient is not finite. States handed over
            before were good.
    """
    first_epoch, first_batch = divmod(int(state.step), num_batches)
    last_tick = last_yield = time.monotonic()
    for epoch in range(first_epoch, epochs):
        if first_batch == 0:
            state = state.replace(loss_sum=jnp.zeros((), jnp.float32))
        for batch in range(first_batch, num_batches):
            sent = tuple(to_device(array) for array in draw(epoch, batch))
            state, _ = train_step(state, sent)
            done, now, is_asked = batch + 1, time.monotonic(), should_stop()
            complete = done == num_batches
            hand_over = complete or is_asked or now - last_yield >= pause_seconds
            loss = None
            if hand_over or now - last_tick >= TICK_SECONDS:
                loss = _mean_loss(state, done, epoch + 1)
                last_tick = time.monotonic()
            on_step(epoch + 1, done, loss)
            if hand_over:
                yield Progress(state, epoch + 1, done, complete, loss)
                last_yield = time.monotonic()
        first_batch = 0


def _mean_loss(state, num_batches, epoch):
    """Fetch the epoch's mean loss; refuse to go on from a state that is spoilt."""
    bad_step = int(state.bad_step)
    if bad_step >= 0:
        raise NonFiniteLossError(
            f"The loss or its gradient is not finite at step {bad_step + 1}, in epoch "
            f"{epoch}. Lower --learning-rate, set --gradient-clip (1.0, say), or look "
            "for extreme values in the data."
        )
    return float(state.loss_sum) / num_batches
