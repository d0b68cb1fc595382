"""Which axis of a TIFF is time, channel, slice, row or column."""

from __future__ import annotations

import math
from collections.abc import Sequence

ORDER = "TCZYX"
# What tifffile calls an axis that a file gives no name to.
UNNAMED = "QI"


def resolve_axes(
    file_axes: str, shape: Sequence[int], axes: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """Name the axes of a file with the letters T, C, Z, Y and X.

    - file_axes, shape: as in tifffile, Y and X last (or followed by S, the samples of
      colour, which are refused).
    - axes: the user's names, one a axis; those of length one may be left out or added
      in front.

    Returns the names, with the length of `shape`, where "-" stands for an axis of
    length one that needs no name; and notes on what was taken for granted. Raises
    ValueError for colour images and for axes that can't be told.
    """
    found = _told(file_axes, shape)
    if file_axes[-1:] == "S" and shape[-1] > 1:
        raise ValueError(
            f"it is a colour image, and volumes are grey: got {found}; convert it to "
            "grey values, or save one channel of it"
        )
    if file_axes[-2:] != "YX":
        raise ValueError(
            f"rows and columns must be the last two axes, got {found}: save it as ZYX"
        )
    if axes is not None:
        return _given(axes, shape, found), ()
    long = [i for i, size in enumerate(shape[:-2]) if size > 1]
    names = ["-"] * (len(shape) - 2)
    notes = []
    for i in long:
        names[i] = file_axes[i]
    if "S" in names:
        raise ValueError(
            f"it is a colour image in separate planes, and volumes are grey: got "
            f"{found}; if the planes are slices that a program took for colours, give "
            f"{_option(_proposal(names, 'S'))}"
        )
    unnamed = [i for i in long if names[i] in UNNAMED]
    if len(unnamed) == 1 and "Z" not in names:
        names[unnamed[0]] = "Z"
        others = [
            _renamed(names, "Z", letter) for letter in "TC" if letter not in names
        ]
        notes.append(
            f"its axis of {shape[unnamed[0]]} has no name and is read as Z"
            + (f"; else give {' or '.join(map(_option, others))}" if others else "")
        )
    foreign = [name for name in names if name not in "TCZ-"]
    if foreign or any(names.count(name) > 1 for name in "TCZ"):
        raise ValueError(
            f"its axes can't be told, got {found}: name them, with one letter of T, C, "
            f"Z an axis and then YX, such as {_option('TZYX')}; save one volume to a "
            "file if there are other axes"
        )
    if "C" in names and "Z" not in names:
        count = shape[names.index("C")]
        notes.append(
            f"it has {count} channels of one slice each; if they are slices, give "
            f"{_option(_proposal(names, 'C'))}"
        )
    return "".join(names) + "YX", tuple(notes)


def _given(axes, shape, found):
    """The user's axes, checked, with the length of the shape."""
    letters = axes.upper()
    sound = (
        letters.endswith("YX")
        and set(letters) <= set(ORDER)
        and len(set(letters)) == len(letters)
    )
    if not sound:
        raise ValueError(
            "axes must be letters of T, C, Z, once each, and end with YX, such as "
            f"'ZYX' or 'TCZYX', got {axes!r}; the file has {found}"
        )
    if len(letters) == len(shape):
        return letters
    long = [i for i, size in enumerate(shape[:-2]) if size > 1]
    extra = len(letters) - 2 - len(long)
    if extra < 0:
        raise ValueError(
            f"axes must have a letter for each axis of the file, got {axes!r} for "
            f"{found}"
        )
    names = ["-"] * (len(shape) - 2)
    for i, letter in zip(long, letters[extra:-2], strict=True):
        names[i] = letter
    return "".join(names) + "YX"


def _proposal(names, mistaken):
    better = next(letter for letter in "ZCT-" if letter not in names)
    return _renamed(names, mistaken, better)


def _renamed(names, old, new):
    letters = [new if name == old else name for name in names if name != "-"]
    return "".join(letters) + "YX"


def _option(axes):
    """For people on the command line, and for those in Python."""
    return f"--axes {axes} (in Python axes={axes!r})"


def _told(file_axes, shape):
    sizes = ", ".join(f"{a}={s}" for a, s in zip(file_axes, shape, strict=True))
    return f"axes {sizes}"


def plane_order(axes: str, shape: Sequence[int]) -> tuple[dict[str, int], list[int]]:
    """Sizes of T, C and Z, and which plane of the file each (t, c, z) is, in order.

    `axes` as `resolve_axes` returns them; the file's planes come in C order of the
    leading axes.
    """
    leading = list(shape[:-2])
    sizes = dict.fromkeys("TCZ", 1)
    strides = dict.fromkeys("TCZ", 0)
    for i, name in enumerate(axes[:-2]):
        if name != "-":
            sizes[name] = leading[i]
            strides[name] = math.prod(leading[i + 1 :])
    order = [
        t * strides["T"] + c * strides["C"] + z * strides["Z"]
        for t in range(sizes["T"])
        for c in range(sizes["C"])
        for z in range(sizes["Z"])
    ]
    return sizes, order
