"""The parts of Fourier neural operators, as Flax Linen modules.

Parameters start from the distributions that PyTorch and neuraloperator use, so that
training from scratch compares. Spatial fields are (batch, *grid, channels) throughout.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxops import pointwise, spectral
from jaxops.device import barrier
from jaxops.matmul import matmul, sum_dtype

SKIPS = ("linear", "identity", "soft-gating", None)
NORMS = ("instance_norm", "group_norm", "batch_norm", None)


def uniform_of_fan_in(fan_in: int) -> Callable:
    """PyTorch's initialiser of linear layers: uniform within 1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Dense(nn.Module):
    """1x1 convolution; ``kernel`` (in, out), ``bias`` (out,)."""

    features: int
    use_bias: bool = True

    @nn.compact
    def weights(self, in_features: int):
        init = uniform_of_fan_in(in_features)
        kernel = self.param("kernel", init, (in_features, self.features))
        bias = self.param("bias", init, (self.features,)) if self.use_bias else None
        return kernel, bias

    def __call__(self, x):
        return pointwise.dense(x, *self.weights(x.shape[-1]))


class ChannelMLP(nn.Module):
    """1x1 convolutions with an activation between; ``fcs_0``, ``fcs_1``, ...

    Attributes:
        features: output channels of each layer.
        non_linearity: name or function, between layers.
        dropout: probability, after every layer, as neuraloperator does; needs an rng
            ``dropout`` in training.
    """

    features: Sequence[int]
    non_linearity: str | Callable = "gelu"
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        x,
        train: bool = False,
        further_bias=None,
        adds_bias: bool = True,
        product: Callable | None = None,
        kernel=None,
        beside=None,
    ):
        """The layers on ``x`` (*points, channels).

        Args:
            x: the field.
            train: whether dropout is on.
            further_bias: (channels,), added to the last one.
            adds_bias: False, without dropout: return the result without the last bias,
                and that bias.
            product: where given, takes the first kernel and returns x times it, and a
                bias that is still to be added, or None.
            kernel: (channels, outputs), of a 1x1 convolution of the result; without
                ``adds_bias``. This is then the ``product`` of what comes behind.
            beside: a field and a kernel, whose product is added to that.
        """
        act = pointwise.activation(self.non_linearity)
        widths = (x.shape[-1], *self.features)
        kernels, biases = [], []
        for i, (width, features) in enumerate(itertools.pairwise(widths)):
            own = Dense(features, name=f"fcs_{i}").weights(width)
            kernels.append(own[0])
            biases.append(own[1])
        if kernel is not None:
            kernels[-1] = _followed(kernels[-1], kernel, x)
            biases[-1] = _followed_bias(biases[-1], kernel, x)
        biases[-1] = _with(biases[-1], further_bias, x)
        dropout = nn.Dropout(self.dropout, deterministic=not train)

        def finished(y, bias):
            y = y + pointwise.on_all_points(bias.astype(y.dtype), y.shape)
            return dropout(y) if self.dropout > 0 else y

        def layers(x, weights, y=None):
            kernels, biases = weights
            again = y is None and len(kernels) > 1 and pointwise.is_cheap(x, kernels[0])
            if again:
                y = x
            elif y is None:
                y = pointwise.dense(x, kernels[0])
            for i, bias in enumerate(biases[:-1], start=1):
                added = beside if i == len(kernels) - 1 else None

                def inputs(y, bias=bias, multiplies=again and i == 1, added=added):
                    y = pointwise.dense(y, kernels[0]) if multiplies else y
                    y = act(finished(y, bias))
                    return y if added is None else jnp.concatenate([y, added[0]], -1)

                inputs = jax.checkpoint(inputs) if again and i == 1 else inputs
                kernel = kernels[i]
                if added is not None:
                    kernel = jnp.concatenate([kernel, added[1].astype(kernel.dtype)])
                y = pointwise.dense_of(inputs, y, kernel)
            return finished(y, biases[-1]) if adds_bias else y

        is_wide = max(self.features) >= 2 * min(widths[0], widths[-1])
        if product is not None:
            y, further = product(kernels[0])
            biases[0] = _with(biases[0], further, x)
            y = layers(x, (kernels, biases), y)
        elif self.dropout > 0 or not is_wide:
            y = layers(x, (kernels, biases))
        else:
            y = pointwise.in_parts(layers, x, (kernels, biases), max(widths))
        return y if adds_bias else (y, biases[-1])


def _followed(weights, kernel, x):
    """The kernel of a 1x1 convolution that comes after what these weights do.

    They are another kernel (two axes), gates (one) or None, for nothing.
    """
    kernel = kernel.astype(sum_dtype(x))
    if weights is None:
        return kernel
    weights = weights.astype(kernel.dtype)
    if weights.ndim == 2:
        return matmul(weights, kernel)
    return kernel * jnp.broadcast_to(weights[:, None], kernel.shape)


def _followed_bias(bias, kernel, x):
    """What a bias is behind a 1x1 convolution.

    Not a product of a vector: IREE's shader of one gave other numbers in one order of
    its threads.
    """
    return _followed(bias, kernel, x).sum(0)


def _with(bias, further, x):
    """A bias and, where there is one, a further bias."""
    if further is None:
        return bias
    return bias.astype(sum_dtype(x)) + further.astype(sum_dtype(x))


class SpectralConv(nn.Module):
    """``jaxops.spectral_conv`` with a dense weight and a bias a channel.

    ``weight`` (2, *rows, in, out), real part first: complex normal of variance
    2/(in+out), half of it in each part. ``bias`` (out,).
    """

    features: int
    n_modes: Sequence[int]
    max_n_modes: Sequence[int] | None = None
    precision: str = "full"
    compat: str | None = None

    @nn.compact
    def __call__(
        self, x, output_shape=None, kernel=None, x_bias=None, further_bias=None
    ):
        """The convolution of ``x`` (batch, *grid, in).

        Args:
            x: the field.
            output_shape: grid of the result.
            kernel: (out, channels), of a 1x1 convolution of the result.
            x_bias: (in,), still to be added to ``x``.
            further_bias: (channels,), added to that of the result.
        """
        variance = 2 / (x.shape[-1] + self.features)
        rows = (*self.n_modes[:-1], self.n_modes[-1] // 2 + 1)
        rows = rows if self.max_n_modes is None else tuple(self.max_n_modes)
        weight = self.param(
            "weight",
            nn.initializers.normal(math.sqrt(variance / 2)),
            (2, *rows, x.shape[-1], self.features),
        )
        normal = nn.initializers.normal(math.sqrt(variance))
        bias = self.param("bias", normal, (self.features,))
        if kernel is not None:
            bias = _followed_bias(bias, kernel, x)
            kernel = kernel.astype(bias.dtype)
        bias = _with(bias, further_bias, x)
        y = spectral.spectral_conv(
            x,
            weight,
            self.n_modes,
            output_shape,
            self.compat,
            self.precision,
            kernel,
            x_bias,
        )
        return y + pointwise.on_all_points(bias.astype(y.dtype), y.shape)


class Skip(nn.Module):
    """A skip connection: ``linear`` (1x1, no bias), ``soft-gating`` or ``identity``."""

    kind: str

    @nn.compact
    def weights(self, channels: int):
        """The kernel (channels, channels) or the gates (channels,); none: None."""
        if self.kind == "linear":
            init = uniform_of_fan_in(channels)
            return self.param("kernel", init, (channels, channels))
        if self.kind == "soft-gating":
            return self.param("weight", nn.initializers.ones, (channels,))
        return None

    def __call__(self, x):
        return _skipped(self.weights(x.shape[-1]), x)


def _skipped(weights, x):
    """x as a :class:`Skip` with these weights hands it on."""
    if weights is None:
        return x
    if weights.ndim == 2:
        return pointwise.dense(x, weights)
    return x * pointwise.on_all_points(weights.astype(x.dtype), x.shape)


def _skipped_bias(weights, bias, x):
    """What becomes there of a bias of x."""
    if weights is None:
        return bias
    if weights.ndim == 2:
        return _followed_bias(bias, weights, x)
    return bias.astype(sum_dtype(x)) * weights.astype(sum_dtype(x))


class Norm(nn.Module):
    """Instance norm (no affine), group norm of one group, or batch norm.

    PyTorch's arithmetic: epsilon 1e-5, the variance about the mean in float32, biased
    where it normalises and unbiased where batch norm keeps it (momentum 0.1).
    """

    kind: str
    epsilon: float = 1e-5
    momentum: float = 0.1

    @nn.compact
    def __call__(self, x, train: bool = False):
        channels = x.shape[-1]
        grid = tuple(range(1, x.ndim - 1))
        if self.kind == "instance_norm":
            return _whiten(x, *_moments(x, grid), self.epsilon)
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        if self.kind == "group_norm":
            y = _whiten(x, *_moments(x, (*grid, x.ndim - 1)), self.epsilon)
        else:
            shape = (1,) * (x.ndim - 1) + (channels,)
            mean, variance = (v.reshape(shape) for v in self._batch_moments(x, train))
            y = _whiten(x, mean, variance, self.epsilon)
        scale, bias = (
            jnp.broadcast_to(v.astype(x.dtype), x.shape) for v in (scale, bias)
        )
        return y * scale + bias

    def _batch_moments(self, x, train: bool):
        zeros, ones = jnp.zeros, jnp.ones
        running_mean = self.variable("batch_stats", "mean", zeros, (x.shape[-1],))
        running_variance = self.variable("batch_stats", "var", ones, (x.shape[-1],))
        if not train:
            return running_mean.value, running_variance.value
        mean, variance = (v.reshape(-1) for v in _moments(x, tuple(range(x.ndim - 1))))
        count = x.size // x.shape[-1]
        if not self.is_initializing():
            unbiased = variance * (count / max(count - 1, 1))
            for running, now in ((running_mean, mean), (running_variance, unbiased)):
                running.value += self.momentum * (now - running.value)
        return mean, variance


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _moments(x, axes: tuple[int, ...]):
    """Mean and biased variance in float32, with the axes kept."""
    mean, deviation = _deviation(x, axes)
    return mean, (deviation * deviation).mean(axes, keepdims=True)


@_moments.defjvp
def _moments_derivative(axes, primals, tangents):
    """The variance does not change with the mean that it is taken about: without that
    term, which is zero, a gradient passes over the field once less."""
    (x,), (tangent,) = primals, tangents
    tangent = pointwise.at_least_float32(tangent)
    _, deviation = _deviation(x, axes)
    change = 2 * (deviation * tangent).mean(axes, keepdims=True)
    return _moments(x, axes), (tangent.mean(axes, keepdims=True), change)


def _deviation(x, axes: tuple[int, ...]):
    x = pointwise.at_least_float32(x)
    mean = x.mean(axes, keepdims=True)
    return mean, x - jnp.broadcast_to(mean, x.shape)


def _whiten(x, mean, variance, epsilon: float):
    factor = jax.lax.rsqrt(variance + jnp.asarray(epsilon, variance.dtype))
    mean, factor = (jnp.broadcast_to(v, x.shape) for v in (mean, factor))
    return ((x.astype(mean.dtype) - mean) * factor).astype(x.dtype)


class FNOBlock(nn.Module):
    """One Fourier layer with its skips, norms and channel MLP.

    After activation: x = norm(conv(x)) + skip(x); act; x = mlp(x) + mlp_skip(x_in);
    norm; act; the last block (``is_last``) leaves out both activations.
    With ``preactivation``, act and the first norm come before all else.
    The channel MLP's own activation is always the exact gelu.
    """

    n_modes: Sequence[int]
    max_n_modes: Sequence[int] | None = None
    scaling: Sequence[float] | None = None
    is_last: bool = False
    use_channel_mlp: bool = True
    channel_mlp_dropout: float = 0.0
    channel_mlp_expansion: float = 0.5
    channel_mlp_skip: str | None = "soft-gating"
    fno_skip: str | None = "linear"
    non_linearity: str | Callable = "gelu"
    stabilizer: str | None = None
    norm: str | None = None
    preactivation: bool = False
    precision: str = "full"
    compat: str | None = None

    @nn.compact
    def __call__(
        self, x, output_shape=None, train: bool = False, x_bias=None, kernel=None
    ):
        """The layer on ``x`` (batch, *grid, channels).

        Args:
            x: the field.
            output_shape: grid of the result.
            train: whether dropout is on and running statistics change.
            x_bias: (channels,), still to be added to ``x``; where :attr:`takes_bias`.
            kernel: (channels, outputs), of a 1x1 convolution of the result; where the
                block :meth:`is_linear` and has no dropout. The result is then the
                product and the bias to be added, as a ChannelMLP takes them.
        """
        channels = x.shape[-1]
        output_shape = scaled_shape(x.shape[1:-1], self.scaling, output_shape)
        act = pointwise.activation(self.non_linearity)
        if self.preactivation:
            x = self._norm(act(x), 0, train)
        conv_input = jnp.tanh(x) if self.stabilizer == "tanh" else x
        conv = SpectralConv(
            channels,
            self.n_modes,
            self.max_n_modes,
            self.precision,
            self.compat,
            name="conv",
        )

        def weights_of_skip(kind: str | None, name: str):
            return Skip(kind, name=name).weights(channels) if kind is not None else None

        def resampled(field):
            return spectral.resample(field, output_shape, self.compat)

        def with_skip(y, kind: str | None, weights):
            return y if kind is None else y + resampled(_skipped(weights, x))

        def bias_of_skip(kind: str | None, weights):
            is_nothing = kind is None or x_bias is None
            return None if is_nothing else _skipped_bias(weights, x_bias, x)

        fno_skip = weights_of_skip(self.fno_skip, "fno_skip")

        def fourier_layer(kernel=None):
            weights, further = fno_skip, bias_of_skip(self.fno_skip, fno_skip)
            if kernel is not None and self.fno_skip is not None:
                weights = _followed(weights, kernel, x)
            y = conv(conv_input, output_shape, kernel, x_bias, further)
            y = y if self.preactivation else self._norm(y, 0, train)
            return with_skip(y, self.fno_skip, weights)

        if self.use_channel_mlp:
            mlp = ChannelMLP(
                (self._hidden(channels), channels),
                dropout=self.channel_mlp_dropout,
                name="channel_mlp",
            )
            mlp_skip = weights_of_skip(self.channel_mlp_skip, "channel_mlp_skip")
            further = bias_of_skip(self.channel_mlp_skip, mlp_skip)
            if self.channel_mlp_skip == "soft-gating" and not self.is_last:
                # One behind the other: a GPU's XLA then sums the gradient of the gates
                # in the loop that has both fields for it, not in the next one, which
                # reads one of them for this alone.
                conv_input, mlp_skip = barrier((conv_input, mlp_skip), "gpu")

        # All is linear up to the activation inside the MLP, so that its first kernel
        # can be joined with those before, and fields of all channels saved.
        if self.is_linear(channels):

            def product(kernel):
                return fourier_layer(kernel), None

            if kernel is None:
                y = mlp(x, train, product=product)
                return with_skip(y, self.channel_mlp_skip, mlp_skip)
            beside = None
            if self.channel_mlp_skip is not None:
                beside = resampled(x), _followed(mlp_skip, kernel, x)
            return mlp(
                x,
                train,
                adds_bias=False,
                product=product,
                kernel=kernel,
                beside=beside,
            )

        y = fourier_layer()
        y = y if self.is_last else act(y)
        if self.preactivation:
            y = self._norm(y, 1, train)
        if self.use_channel_mlp:
            y = with_skip(mlp(y, train, further), self.channel_mlp_skip, mlp_skip)
        if self.preactivation:
            return y
        y = self._norm(y, 1, train)
        return y if self.is_last else act(y)

    @property
    def takes_bias(self) -> bool:
        """Whether ``x_bias`` may be given: all that reads the field is linear, and
        what becomes of it joins other biases."""
        plain = (self.norm, self.stabilizer, self.compat) == (None, None, None)
        changes = self.preactivation or self.channel_mlp_dropout > 0
        return plain and self.precision == "full" and not (changes or self.is_last)

    def is_linear(self, channels: int) -> bool:
        """But for the activation inside its MLP, which has not more channels."""
        is_plain = self.norm is None and self.precision == "full"
        is_narrow = self._hidden(channels) <= channels
        return self.is_last and self.use_channel_mlp and is_plain and is_narrow

    def _hidden(self, channels: int) -> int:
        return round(channels * self.channel_mlp_expansion)

    def _norm(self, x, index: int, train: bool):
        if self.norm is None:
            return x
        return Norm(self.norm, name=f"norm_{index}")(x, train)


def scaled_shape(
    grid: Sequence[int],
    scaling: Sequence[float] | None,
    output_shape: Sequence[int] | None,
) -> tuple[int, ...]:
    """The grid of a layer's output: as asked, else scaled an axis, else unchanged."""
    if output_shape is not None:
        return tuple(output_shape)
    if scaling is None:
        return tuple(grid)
    shape = tuple(round(n * s) for n, s in zip(grid, scaling, strict=True))
    if min(shape) < 1:
        raise ValueError(
            f"resolution_scaling_factor {tuple(scaling)} leaves no point of a grid of "
            f"{tuple(grid)}."
        )
    return shape
