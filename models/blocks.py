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
    def __call__(self, x, train: bool = False, product: Callable | None = None):
        """``product``, where given, makes x times the first kernel from the latter."""
        act = pointwise.activation(self.non_linearity)
        widths = (x.shape[-1], *self.features)
        weights = [
            Dense(features, name=f"fcs_{i}").weights(width)
            for i, (width, features) in enumerate(itertools.pairwise(widths))
        ]
        dropout = nn.Dropout(self.dropout, deterministic=not train)

        def finished(y, bias):
            y = y + pointwise.on_all_points(bias.astype(y.dtype), y.shape)
            return dropout(y) if self.dropout > 0 else y

        def layers(x, weights):
            (kernel, bias), *others = weights
            y = pointwise.dense(x, kernel) if product is None else product(kernel)
            for kernel, following in others:
                y = pointwise.dense_of(
                    lambda y, bias=bias: act(finished(y, bias)), y, kernel
                )
                bias = following
            return finished(y, bias)

        is_wide = max(self.features) >= 2 * min(widths[0], widths[-1])
        if self.dropout > 0 or product is not None or not is_wide:
            return layers(x, weights)
        return pointwise.in_parts(layers, x, weights, max(widths))


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
    def __call__(self, x, output_shape=None, kernel=None):
        """``kernel`` (out, channels): of a 1x1 convolution of the result."""
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
            kernel, bias = (_wide(v, x) for v in (kernel, bias))
            # Not a product of a vector: IREE's shader of one gave other numbers in one
            # order of its threads.
            bias = (kernel * jnp.broadcast_to(bias[:, None], kernel.shape)).sum(0)
        y = spectral.spectral_conv(
            x, weight, self.n_modes, output_shape, self.compat, self.precision, kernel
        )
        return y + pointwise.on_all_points(bias.astype(y.dtype), y.shape)


class Skip(nn.Module):
    """A skip connection: ``linear`` (1x1, no bias), ``soft-gating`` or ``identity``."""

    kind: str

    @nn.compact
    def __call__(self, x, kernel=None):
        """``kernel`` (in, channels): of a 1x1 convolution of the result."""
        channels = x.shape[-1]
        if self.kind == "linear":
            init = uniform_of_fan_in(channels)
            own = self.param("kernel", init, (channels, channels))
            if kernel is not None:
                own = matmul(_wide(own, x), _wide(kernel, x))
            return pointwise.dense(x, own)
        if self.kind == "soft-gating":
            weight = self.param("weight", nn.initializers.ones, (channels,))
            if kernel is None:
                return x * pointwise.on_all_points(weight.astype(x.dtype), x.shape)
            gates = jnp.broadcast_to(_wide(weight, x)[:, None], kernel.shape)
            kernel = _wide(kernel, x) * gates
        return x if kernel is None else pointwise.dense(x, kernel)


def _wide(weights, x):
    """Weights as they are multiplied with each other before they meet ``x``."""
    return weights.astype(sum_dtype(x))


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
    def __call__(self, x, output_shape=None, train: bool = False):
        channels = x.shape[-1]
        output_shape = scaled_shape(x.shape[1:-1], self.scaling, output_shape)
        act = pointwise.activation(self.non_linearity)
        if self.preactivation:
            x = self._norm(act(x), 0, train)

        def skip(kind: str | None, name: str) -> Callable:
            module = Skip(kind, name=name) if kind is not None else None

            def added(y, kernel=None):
                if module is None:
                    return y
                return y + spectral.resample(
                    module(x, kernel), output_shape, self.compat
                )

            return added

        fno_skip = skip(self.fno_skip, "fno_skip")
        conv = SpectralConv(
            channels,
            self.n_modes,
            self.max_n_modes,
            self.precision,
            self.compat,
            name="conv",
        )
        conv_input = jnp.tanh(x) if self.stabilizer == "tanh" else x

        def fourier_layer(kernel=None):
            y = conv(conv_input, output_shape, kernel)
            y = y if self.preactivation else self._norm(y, 0, train)
            return fno_skip(y, kernel)

        hidden = round(channels * self.channel_mlp_expansion)
        if self.use_channel_mlp:
            mlp_skip = skip(self.channel_mlp_skip, "channel_mlp_skip")
            mlp = ChannelMLP(
                (hidden, channels), dropout=self.channel_mlp_dropout, name="channel_mlp"
            )
            # All is linear up to the activation inside the MLP, so that its first
            # kernel can be joined with those before, and fields of all channels saved.
            is_linear = self.is_last and self.norm is None and self.precision == "full"
            if is_linear and hidden <= channels:
                return mlp_skip(mlp(x, train, fourier_layer))

        y = fourier_layer()
        y = y if self.is_last else act(y)
        if self.preactivation:
            y = self._norm(y, 1, train)
        if self.use_channel_mlp:
            y = mlp_skip(mlp(y, train))
        if self.preactivation:
            return y
        y = self._norm(y, 1, train)
        return y if self.is_last else act(y)

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
