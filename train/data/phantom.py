"""A synthetic volume to train on where there is no data: tubes and blobs."""

from __future__ import annotations

import math

import numpy as np


def phantom(shape: tuple[int, int, int] = (48, 192, 192), seed: int = 0) -> np.ndarray:
    """Fluorescent tubes and blobs in the dark: float32 (z, y, x), about 0 to 1, sharp.

    Curved tubes whose radius and brightness change along them, and textured ellipsoids,
    in numbers that go with the volume; edges are one voxel wide. What Degradation makes
    of it looks like a fluorescence microscope's volume.

    The same shape and seed give the same volume on every numpy: all chance comes from
    PCG64's uniform numbers.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"a phantom needs a shape (z, y, x) above 0, got {shape}")
    rng = np.random.Generator(np.random.PCG64(seed))
    volume = np.full(shape, 0.02, np.float32)
    num_voxels = math.prod(shape)
    for _ in range(max(num_voxels // 40_000, 1)):
        _add_blob(volume, rng)
    for _ in range(max(num_voxels // 25_000, 2)):
        _add_tube(volume, rng)
    return volume


def _add_tube(volume, rng):
    """A walk that keeps turning a little, as balls in a row."""
    size = np.array(volume.shape)
    position = rng.random(3) * size
    turn, tilt = 2 * np.pi * rng.random(), 0.6 * (rng.random() - 0.5)
    radius, brightness = 0.8 + 1.7 * rng.random(), 0.3 + 0.6 * rng.random()
    extent = 0.5 * (size[1] + size[2])
    length = extent * (0.5 + rng.random())
    flatness = min(2 * size[0] / extent, 1.0)  # it shall not leave thin volumes at once
    waves = 2 * np.pi * rng.random((4, 2)) * [1.0, 3.0]  # phase; times along the tube
    curls = 2 * np.pi * rng.random(2)
    step = 0.5
    num_steps = int(length / step)
    for i in range(num_steps):
        part = i / num_steps
        wave = np.sin(waves[:, 0] + waves[:, 1] * part)
        angle = turn + 1.2 * wave[0] + 0.3 * math.sin(curls[0] + curls[1] * 6 * part)
        slope = flatness * (tilt + 0.4 * wave[1])
        position = position + step * np.array(
            [
                math.sin(slope),
                math.cos(slope) * math.sin(angle),
                math.cos(slope) * math.cos(angle),
            ]
        )
        _add_ball(
            volume,
            position,
            radius * (1 + 0.3 * wave[2]),
            brightness * (1 + 0.35 * wave[3]),
        )


def _add_ball(volume, centre, radius, brightness):
    window = _window(volume, centre, radius + 1)
    if window is None:
        return
    box, (z, y, x) = window
    distance = np.sqrt(z**2 + y**2 + x**2)
    ball = brightness * np.clip(radius + 0.5 - distance, 0, 1)
    np.maximum(volume[box], ball, out=volume[box], casting="same_kind")


def _add_blob(volume, rng):
    """An ellipsoid turned in the plane, bright spots and dark folds in it."""
    centre = rng.random(3) * volume.shape
    radii = np.array([4.0, 6.0, 9.0]) * (0.6 + 0.7 * rng.random(3))
    turn = 2 * np.pi * rng.random()
    brightness = 0.15 + 0.3 * rng.random()
    directions = rng.random((12, 4)) * [2.0, 2.0, 2.0, 2 * np.pi] - [1.0, 1.0, 1.0, 0.0]
    reach = radii.max() * (1 + 0.5 / radii.min()) + 1
    window = _window(volume, centre, reach)
    if window is None:
        return
    box, (z, y, x) = window
    y, x = (
        math.cos(turn) * y - math.sin(turn) * x,
        math.sin(turn) * y + math.cos(turn) * x,
    )
    scaled = np.sqrt((z / radii[0]) ** 2 + (y / radii[1]) ** 2 + (x / radii[2]) ** 2)
    # Distances to the surface, nearly: the smallest radius makes the edge of a voxel.
    inside = np.clip((1 - scaled) * radii.min() + 0.5, 0, 1)
    texture = sum(
        np.sin(1.3 * (a * z + b * y + c * x) + phase) for a, b, c, phase in directions
    )
    blob = brightness * inside * np.clip(1 + 0.25 * texture, 0.2, 3)
    np.maximum(volume[box], blob, out=volume[box], casting="same_kind")


def _window(volume, centre, reach):
    """The box around a centre, and its (z, y, x) from there; None if all is outside."""
    box = tuple(
        slice(max(math.floor(c - reach), 0), min(math.ceil(c + reach) + 1, n))
        for c, n in zip(centre, volume.shape, strict=True)
    )
    if any(part.start >= part.stop for part in box):
        return None
    grid = np.ogrid[box]
    return box, tuple(g - c for g, c in zip(grid, centre, strict=True))
