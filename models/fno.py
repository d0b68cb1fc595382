"""Fourier neural operators in one, two and three dimensions.

Paper: Li et al., "Fourier Neural Operator for Parametric Partial Differential
Equations", arXiv:2010.08895. Reference code: neuraloperator 2.0.0 (MIT), whose argument
names, defaults and initial distributions these are; ``models.from_neuralop`` reads its
weights. Deviations, each the mathematically right one, with ``compat="neuralop-2.0"``
to go back where weights were trained that way:

* odd grids are exact (there the spectrum comes back turned by one);
* a layer whose output grid differs is the Fourier interpolant, skips included.

On every device a spectrum that is not Hermitian gives NumPy's field, which is
neuraloperator's on a CPU; on large grids CUDA's FFT makes another one of it.
"""

import functools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxops import pointwise
from jaxops.device import device_kind, once
from jaxops.matmul import has_matrix_units
from models.arguments import known_arguments_only
from models.blocks import NORMS, SKIPS, ChannelMLP, FNOBlock, scaled_shape

Scaling = float | Sequence[float] | Sequence[Sequence[float]] | None
Padding = float | Sequence[float] | Sequence[Sequence[float]] | None


@known_arguments_only
class FNO(nn.Module):
    """Fourier neural operator: (batch, *grid, in_channels) to (.., out_channels).

    ``variables = model.init(jax.random.key(0), x)`` makes weights, and
    ``y = model.apply(variables, x, output_shape=None, train=False)`` calls the model.
    ``output_shape`` is the grid of the output, or a list with one grid (or None) a
    layer. ``train`` switches dropout (rng ``dropout``) and the running statistics of
    batch norm (mutable collection ``batch_stats``) on.

    Attributes:
        n_modes: modes kept along each spatial axis, negative ones counted in: 16 keeps
            -8..7, on the last axis 0..8. More than the grid has: clamped, with a
            warning.
        in_channels, out_channels, hidden_channels: of the data and of the layers.
        n_layers: Fourier layers.
        lifting_channel_ratio, projection_channel_ratio: hidden channels of the two
            outer MLPs, relative to ``hidden_channels``; lifting 0 is one linear layer.
        positional_embedding: ``"grid"`` appends the coordinates of each axis, from
            0 on, without the end point 1, as channels; None does not.
        non_linearity: ``"gelu"`` (exact) or another name of
            ``jaxops.pointwise.ACTIVATIONS``, or a function.
        norm: None, ``"instance_norm"``, ``"group_norm"`` (one group), ``"batch_norm"``.
        use_channel_mlp, channel_mlp_dropout, channel_mlp_expansion: the layers' MLPs.
        channel_mlp_skip, fno_skip: ``"linear"``, ``"soft-gating"``, ``"identity"`` or
            None.
        resolution_scaling_factor: of each layer's grid: a number, one per layer, or per
            layer a list with one per axis.
        domain_padding: zeros around the lifted field, as a fraction of the grid: a
            number (both ends of all axes), one per axis, or a pair (before, after) per
            axis.
        fno_block_precision: ``"full"``; ``"half"`` transforms and multiplies in
            float16; ``"mixed"`` only multiplies. Weights stay float32.
        stabilizer: ``"tanh"`` before each spectral convolution, or None.
        max_n_modes: rows of the spectral weights where they are to hold more modes than
            ``n_modes`` uses now; the last entry is not halved.
        preactivation: activation and norm before the convolution.
        compat: ``"neuralop-2.0"``, see above, or None.

    Raises:
        TypeError: for an unknown argument. ValueError: for an argument out of its
            domain, or an input of another rank or number of channels.
    """

    n_modes: Sequence[int]
    in_channels: int
    out_channels: int
    hidden_channels: int
    n_layers: int = 4
    lifting_channel_ratio: float = 2
    projection_channel_ratio: float = 2
    positional_embedding: str | None = "grid"
    non_linearity: str | Callable = "gelu"
    norm: str | None = None
    use_channel_mlp: bool = True
    channel_mlp_dropout: float = 0.0
    channel_mlp_expansion: float = 0.5
    channel_mlp_skip: str | None = "soft-gating"
    fno_skip: str | None = "linear"
    resolution_scaling_factor: Scaling = None
    domain_padding: Padding = None
    fno_block_precision: str = "full"
    stabilizer: str | None = None
    max_n_modes: Sequence[int] | None = None
    preactivation: bool = False
    compat: str | None = None

    def __post_init__(self):
        if isinstance(self.n_modes, int):
            self.n_modes = (self.n_modes,)
        if isinstance(self.max_n_modes, int):
            self.max_n_modes = (self.max_n_modes,)
        _check_arguments(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, x, output_shape=None, train: bool = False):
        n_dim = len(self.n_modes)
        if x.ndim != n_dim + 2 or x.shape[-1] != self.in_channels:
            axes = ", ".join("xyz"[:n_dim] if n_dim <= 3 else ["..."])
            raise ValueError(
                f"The input is (batch, {axes}, channels) with {self.in_channels} "
                f"channels, channels last; got {x.shape=}."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(
                    f"{type(self).__name__} takes real fields; got {x.dtype}. Pass "
                    "real and imaginary part as two channels."
                )
            x = x.astype(jnp.result_type(float))  # masks and counts
        shapes = _shape_a_layer(output_shape, self.n_layers, n_dim)
        scalings = _scaling_a_layer(
            self.resolution_scaling_factor, self.n_layers, n_dim
        )
        blocks = [
            FNOBlock(
                n_modes=self.n_modes,
                max_n_modes=self.max_n_modes,
                is_last=i == self.n_layers - 1,
                use_channel_mlp=self.use_channel_mlp,
                channel_mlp_dropout=self.channel_mlp_dropout,
                channel_mlp_expansion=self.channel_mlp_expansion,
                channel_mlp_skip=self.channel_mlp_skip,
                fno_skip=self.fno_skip,
                non_linearity=self.non_linearity,
                stabilizer=self.stabilizer,
                norm=self.norm,
                preactivation=self.preactivation,
                precision=self.fno_block_precision,
                compat=self.compat,
                name=f"blocks_{i}",
            )
            for i in range(self.n_layers)
        ]
        grid = x.shape[1:-1]
        padding = _padding_points(self.domain_padding, grid)
        is_padded = any(before or after for before, after in padding)

        x, bias = self._lift(x)
        # A pass over the field less; on a CPU nothing was gained.
        is_left = blocks[0].takes_bias and device_kind() != "cpu" and not is_padded
        if not is_left:
            # Once, else it is done for each of three readers.
            x = once(x + pointwise.on_all_points(bias.astype(x.dtype), x.shape))
            bias = None
        if is_padded:
            x = jnp.pad(x, [(0, 0), *padding, (0, 0)])
        # What is linear at the end of the last block is joined with the projection
        # where more products cost less than the fields that are not written then.
        is_linear = blocks[-1].is_linear(self.hidden_channels)
        is_plain = not is_padded and self.channel_mlp_dropout == 0
        joins = is_linear and is_plain and has_matrix_units(x.dtype)
        inner = grid  # the grid of the data, without what is padded
        for block, scaling, shape in zip(blocks, scalings, shapes, strict=True):
            inner = scaled_shape(inner, scaling, shape)
            outer = tuple(
                n + sum(pads)
                for n, pads in zip(
                    inner, _scaled_padding(padding, grid, inner), strict=True
                )
            )
            if block.is_last and joins:
                return self._project(x, functools.partial(block, x, outer, train, bias))
            x = block(x, outer, train, bias)
            bias = None
        if is_padded:
            starts = [pads[0] for pads in _scaled_padding(padding, grid, inner)]
            window = [slice(s, s + n) for s, n in zip(starts, inner, strict=True)]
            x = x[(slice(None), *window)]
        return self._project(x)

    def _project(self, x, product: Callable | None = None):
        """``product``: see :class:`ChannelMLP`."""
        hidden = int(self.projection_channel_ratio * self.hidden_channels)
        features = hidden, self.out_channels
        mlp = ChannelMLP(features, self.non_linearity, name="projection")
        return mlp(x, product=product)

    def _lift(self, x):
        """The field without its last bias, and that."""
        hidden = int(self.lifting_channel_ratio * self.hidden_channels)
        features = (hidden, self.hidden_channels) if hidden else (self.hidden_channels,)
        mlp = ChannelMLP(features, self.non_linearity, name="lifting")
        if self.positional_embedding is not None:
            x = append_grid(x)
        return mlp(x, adds_bias=False)


@known_arguments_only
class FNO1D(FNO):
    """:class:`FNO` on (batch, x, channels)."""


@known_arguments_only
class FNO2D(FNO):
    """:class:`FNO` on (batch, x, y, channels)."""


@known_arguments_only
class FNO3D(FNO):
    """:class:`FNO` on (batch, x, y, z, channels)."""


_DIMENSIONS = {"FNO1D": 1, "FNO2D": 2, "FNO3D": 3}


def append_grid(x):
    """Append the coordinate of each spatial axis, n/N for point n of N, as channels."""
    grid = x.shape[1:-1]
    columns = [x]
    for axis, size in enumerate(grid):
        shape = [1] * x.ndim
        shape[1 + axis] = size
        points = jnp.asarray(np.arange(size) / size, x.dtype).reshape(shape)
        columns.append(jnp.broadcast_to(points, (*x.shape[:-1], 1)))
    return jnp.concatenate(columns, axis=-1)


def _padding_points(padding: Padding, grid) -> list[tuple[int, int]]:
    if padding is None:
        return [(0, 0)] * len(grid)
    if not isinstance(padding, Sequence):
        padding = [padding] * len(grid)
    pairs = [p if isinstance(p, Sequence) else (p, p) for p in padding]
    return [
        (round(before * n), round(after * n))
        for (before, after), n in zip(pairs, grid, strict=True)
    ]


def _scaled_padding(padding, grid, inner) -> list[tuple[int, int]]:
    """The padding at a later layer, where ``grid`` has become ``inner``."""
    return [
        (round(before * m / n), round(after * m / n))
        for (before, after), n, m in zip(padding, grid, inner, strict=True)
    ]


def _scaling_a_layer(scaling: Scaling, n_layers: int, n_dim: int) -> list:
    if scaling is None:
        return [None] * n_layers
    if not isinstance(scaling, Sequence):
        return [(scaling,) * n_dim] * n_layers
    return [tuple(s) if isinstance(s, Sequence) else (s,) * n_dim for s in scaling]


def _shape_a_layer(output_shape, n_layers: int, n_dim: int) -> list:
    if output_shape is None:
        return [None] * n_layers

    def is_grid(value):
        return (
            isinstance(value, Sequence)
            and len(value) == n_dim
            and all(isinstance(n, (int, np.integer)) and n >= 1 for n in value)
        )

    if is_grid(output_shape):
        return [None] * (n_layers - 1) + [tuple(output_shape)]
    if (
        not isinstance(output_shape, Sequence)
        or len(output_shape) != n_layers
        or not all(shape is None or is_grid(shape) for shape in output_shape)
    ):
        raise ValueError(
            f"output_shape is a grid of {n_dim} sizes, or a list of {n_layers} grids "
            f"or Nones, one for each layer; got {output_shape}."
        )
    return [None if shape is None else tuple(shape) for shape in output_shape]


def _is_count(value) -> bool:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_whole and value >= 1


def _is_number(value) -> bool:
    is_real = isinstance(value, (int, float, np.integer, np.floating))
    return is_real and not isinstance(value, bool) and math.isfinite(value)


def _check_arguments(model: FNO) -> None:
    name = type(model).__name__

    def refuse(rule: str, argument: str) -> None:
        value = getattr(model, argument)
        raise ValueError(f"{name}: {rule}; got {argument}={value!r}.")

    if not hasattr(model.n_modes, "__len__") or isinstance(model.n_modes, str):
        refuse("n_modes has one whole number for each axis", "n_modes")
    n_dim = len(model.n_modes)

    wanted = _DIMENSIONS.get(name, n_dim)
    if n_dim != wanted or n_dim < 1:
        refuse(f"n_modes has one entry for each of {wanted} axes", "n_modes")
    if not all(_is_count(n) for n in model.n_modes):
        refuse("n_modes are whole numbers of at least 1", "n_modes")
    for argument in ("in_channels", "out_channels", "hidden_channels", "n_layers"):
        if not _is_count(getattr(model, argument)):
            refuse(f"{argument} is a whole number of at least 1", argument)
    for argument in (
        "lifting_channel_ratio",
        "projection_channel_ratio",
        "channel_mlp_dropout",
        "channel_mlp_expansion",
    ):
        if not _is_number(getattr(model, argument)):
            refuse(f"{argument} is a number", argument)
    choices = {
        "positional_embedding": ("grid", None),
        "norm": NORMS,
        "channel_mlp_skip": SKIPS,
        "fno_skip": SKIPS,
        "fno_block_precision": ("full", "half", "mixed"),
        "stabilizer": ("tanh", None),
        "compat": ("neuralop-2.0", None),
    }
    for argument, allowed in choices.items():
        if getattr(model, argument) not in allowed:
            refuse(f"{argument} is one of {', '.join(map(repr, allowed))}", argument)
    pointwise.activation(model.non_linearity)
    if not 0 <= model.channel_mlp_dropout < 1:
        refuse("channel_mlp_dropout is a probability below 1", "channel_mlp_dropout")
    if model.lifting_channel_ratio < 0:
        refuse("lifting_channel_ratio is not negative", "lifting_channel_ratio")
    if int(model.projection_channel_ratio * model.hidden_channels) < 1:
        refuse(
            "the projection needs at least one hidden channel",
            "projection_channel_ratio",
        )
    if (
        model.use_channel_mlp
        and round(model.hidden_channels * model.channel_mlp_expansion) < 1
    ):
        refuse(
            "the channel MLP needs at least one hidden channel",
            "channel_mlp_expansion",
        )
    rows = (*model.n_modes[:-1], model.n_modes[-1] // 2 + 1)
    most = model.max_n_modes
    if most is not None and (
        len(most) != n_dim or any(m < r for m, r in zip(most, rows, strict=True))
    ):
        refuse(f"max_n_modes has at least {rows}, what n_modes needs", "max_n_modes")
    _check_padding(model, n_dim, refuse)
    _check_scaling(model, n_dim, refuse)


def _check_padding(model: FNO, n_dim: int, refuse: Callable) -> None:
    padding = model.domain_padding
    if padding is None:
        return
    rule = (
        "domain_padding is a fraction, one per axis, or a pair (before, after) per "
        "axis, none negative"
    )
    axes = padding if isinstance(padding, Sequence) else [padding] * n_dim
    pairs = [p if isinstance(p, Sequence) else (p, p) for p in axes]
    if len(pairs) != n_dim or any(
        len(p) != 2 or not all(_is_number(v) and v >= 0 for v in p) for p in pairs
    ):
        refuse(rule, "domain_padding")


def _check_scaling(model: FNO, n_dim: int, refuse: Callable) -> None:
    scaling = model.resolution_scaling_factor
    if not isinstance(scaling, Sequence):
        layers = [] if scaling is None else [(scaling,)]
    else:
        layers = [s if isinstance(s, Sequence) else (s,) * n_dim for s in scaling]
        if len(layers) != model.n_layers or any(len(s) != n_dim for s in layers):
            layers = [(0,)]
    if not all(_is_number(s) and s > 0 for layer in layers for s in layer):
        refuse(
            "resolution_scaling_factor is a positive number, one per layer, or per "
            "layer a list with one per axis",
            "resolution_scaling_factor",
        )
