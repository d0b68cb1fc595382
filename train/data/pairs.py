"""Pairs of input and target fields, in the one form that training takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AXIS_NAMES = ("x", "y", "z")


@dataclass(frozen=True)
class Pairs:
    """Input fields and the target fields that belong to them, channels last.

    Make it with `make_pairs`, which checks what this class promises.
    """

    inputs: np.ndarray
    """(samples, *grid, input channels), float32, contiguous, native byte order."""

    targets: np.ndarray
    """(samples, *grid, target channels), likewise; same samples and same grid."""

    source: str
    """Where the fields come from, for people: a file and its keys, or an equation."""

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of points along each spatial axis."""
        return self.inputs.shape[1:-1]


def make_pairs(inputs: np.ndarray, targets: np.ndarray, source: str) -> Pairs:
    """Check and convert two channels-last arrays (samples, *grid, channels).

    Raises ValueError, with `source` in the message, for arrays that are complex or not
    numbers, hold NaN or infinite values (in float32), have no sample, or differ in the
    number of samples or in the grid.
    """
    if inputs.shape[0] != targets.shape[0]:
        raise ValueError(
            f"{source}: inputs and targets must have the same number of samples (axis "
            f"0), got {inputs.shape[0]} and {targets.shape[0]}"
        )
    if inputs.shape[1:-1] != targets.shape[1:-1]:
        raise ValueError(
            f"{source}: inputs and targets must lie on one grid, got "
            f"{inputs.shape[1:-1]} and {targets.shape[1:-1]} points"
        )
    return Pairs(
        as_fields(inputs, f"{source}: inputs"),
        as_fields(targets, f"{source}: targets"),
        source,
    )


def as_fields(array: np.ndarray, name: str) -> np.ndarray:
    """Return (samples, *grid, channels) as contiguous native float32.

    Raises ValueError, with `name` in the message, as `make_pairs` does.
    """
    check_numbers(array.dtype, name)
    if array.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    with np.errstate(over="ignore"):  # an overflow becomes an infinity: caught below
        fields = np.ascontiguousarray(array, dtype=np.float32)
    check_finite(fields, name)
    return fields


def check_numbers(dtype: np.dtype, name: str) -> None:
    """Raise ValueError unless `dtype` is real: bool, integer or floating point."""
    # A MATLAB complex array in HDF5 is a compound of its real and imaginary parts.
    compound = dtype.names is not None and set(dtype.names) == {"real", "imag"}
    if compound or np.issubdtype(dtype, np.complexfloating):
        raise ValueError(
            f"{name} must be real, got complex values ({dtype}); store the real and "
            "imaginary parts as two channels"
        )
    try:
        # Extension types (bfloat16) are known by what they convert to, not by a kind.
        real = dtype.kind in "biuf" or np.can_cast(dtype, np.float32)
    except TypeError:
        real = False
    if not real:
        raise ValueError(
            f"{name} must hold numbers (bool, integer or floating point), got {dtype}"
        )


def check_finite(fields: np.ndarray, name: str) -> None:
    """Raise ValueError if (samples, *grid, channels) holds a NaN or an infinity."""
    if np.isfinite(fields).all():
        return
    bad = ~np.isfinite(fields)
    first = tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
    axes = ", ".join(("sample", *AXIS_NAMES[: fields.ndim - 2], "channel"))
    raise ValueError(
        f"{name} must be finite in {fields.dtype}, got {int(bad.sum())} NaN or "
        f"infinite values of {fields.size}, the first at ({axes}) = {first}; mend or "
        "leave out these samples"
    )
