"""A volumetric network on tiles: compiled once a shape, statistics of whole volumes.

Networks are run in a form of their convolutions in which a tile is computed as the
whole volume is, see ``form`` of `models.volume_model.VolumeModel`: the fastest one
where no tile is cut along the depth, whose slices it takes in groups; else a local one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.backend import to_device
from train.memory import Need, program_need
from train.tiles import Sizes, Tile, Tiling, keeps_depth

FORM = "auto where the depth is kept, else local"  # part of what settles the numbers


class TileNetwork:
    """A model and its variables, to be run on windows of (depth, height, width).

    - depth: of the volumes that it is run on, where they all have one. Windows as deep
      take the fastest form, where `train.tiles.keeps_depth`; all others a local one.
    """

    def __init__(self, model, variables, depth: int | None = None):
        self.model = model.clone(form="local")
        is_kept = depth is not None and keeps_depth(depth, model.receptive_radius[0])
        self._kept = depth if is_kept else None
        self.variables = variables  # others of the same shapes may take their place
        self._programs = {}
        self._layers = None  # the tree of statistics, and their shapes

    def __call__(self, window: np.ndarray, means: list | None = None) -> np.ndarray:
        """The output (depth, height, width), float32, each axis times the scale.

        - window: float32.
        - means: of the whole volume, from `Statistics`; None where the network has no
          statistics, or to take the window's own.
        """
        program = self._program(window.shape, means is not None)
        result = program(self._bound(means), to_device(window[None, ..., None]))
        return np.asarray(result)[0, ..., 0]

    def sums(self, window, means, region) -> list[np.ndarray]:
        """Sums over a region of a window, (1, channels) float64 a statistic layer."""
        program = self._program(window.shape, means is not None, sums=True)
        x = to_device(window[None, ..., None])
        bounds = to_device(np.asarray(region), dtype=jnp.int32)
        sums = program(self._bound(means), x, bounds)
        return [np.asarray(s, np.float64) for s in jax.tree.leaves(sums)]

    def tiling(self, size: Sizes, window: Sizes) -> Tiling:
        return Tiling(
            tuple(size), tuple(window), self.model.receptive_radius, self.model.stride
        )

    def need(self, window: Sizes) -> Need:
        """What running a window of this size takes, see `train.memory.Need`."""
        has_means = self.model.statistic_layers > 0
        program = self._program(tuple(window), has_means)
        return program_need(program, *self._traced(tuple(window), has_means))

    def need_by_trace(self, window: Sizes) -> Need:
        """A guess of the same, without compiling."""
        has_means = self.model.statistic_layers > 0
        return program_need(None, *self._traced(tuple(window), has_means))

    def keep_only(self, window: Sizes) -> None:
        """Forget the programs for windows of other sizes."""
        kept = {key: p for key, p in self._programs.items() if key[0] == tuple(window)}
        self._programs = kept

    def _model(self, window):
        is_kept = window[0] == self._kept
        return self.model.clone(form="auto") if is_kept else self.model

    def _sums(self, variables, x, region):
        model = self._model(x.shape[1:4])
        _, new = model.apply(variables, x, region=region, mutable=["sums"])
        return new["sums"]

    def _program(self, window, has_means, sums=False):
        key = (tuple(window), has_means, sums)
        if key not in self._programs:
            function, *arguments = self._traced(*key)
            self._programs[key] = jax.jit(function).lower(*arguments).compile()
        return self._programs[key]

    def _traced(self, window, has_means, sums=False):
        """The function, and its arguments as shapes."""
        variables = jax.tree.map(_shape, self.variables)
        if has_means:
            variables = {**variables, "means": self._statistics()}
        x = jax.ShapeDtypeStruct((1, *window, 1), jnp.float32)
        if not sums:
            return self._model(window).apply, variables, x
        return self._sums, variables, x, jax.ShapeDtypeStruct((3, 2), jnp.int32)

    def _statistics(self):
        if self._layers is None:
            x = jnp.zeros(self.model.example_shape())
            sums = jax.eval_shape(self._sums, self.variables, x, None)
            self._layers = jax.tree.map(_shape, sums)
        return self._layers

    def _bound(self, means):
        if means is None:
            return self.variables
        tree = jax.tree.structure(self._statistics())
        means = [to_device(np.asarray(mean, np.float32)) for mean in means]
        return {**self.variables, "means": jax.tree.unflatten(tree, means)}


def _shape(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@dataclass
class Statistics:
    """Means over a whole volume, collected in passes over its tiles; see `RCAN3D`.

    Plain lists, which a file holds exactly: a number for each channel of each layer.
    """

    means: list[list[float]] | None = None
    """Of the last pass that ended."""

    sums: list[list[float]] | None = None
    """Of the pass that runs, over its first tiles."""

    tiles: int = 0
    """Of the pass that runs, done."""

    passes: int = 0
    is_settled: bool = False

    def collect(
        self, network: TileNetwork, tiling: Tiling, read: Callable[[Tile], np.ndarray]
    ) -> Iterator[None]:
        """Go on to the end; yields after each tile.

        The means of a layer are right once those before it are, so that each pass makes
        one more right at least, and a pass that changes nothing is the last.
        """
        num_points = int(np.prod(tiling.size, dtype=np.int64))
        tiles = tiling.tiles
        while not self.is_settled:
            for tile in tiles[self.tiles :]:
                sums = network.sums(read(tile), self.rows(), tile.region)
                if self.sums is not None:
                    pairs = zip(sums, _rows(self.sums), strict=True)
                    sums = [new + old for new, old in pairs]
                self.sums = [layer[0].tolist() for layer in sums]
                self.tiles += 1
                if self.tiles == len(tiles):
                    self._end_pass(num_points, network.model.statistic_layers)
                yield

    def rows(self) -> list[np.ndarray] | None:
        """The means as a network takes them: (1, channels) a layer; None if there are
        none."""
        return _rows(self.means)

    def restart_pass(self) -> None:
        """Forget the tiles of the pass that runs: others take their place."""
        self.sums, self.tiles = None, 0

    def _end_pass(self, num_points, num_layers):
        means = [
            [float(np.float32(value / num_points)) for value in layer]
            for layer in self.sums
        ]
        self.passes += 1
        self.is_settled = means == self.means or self.passes == num_layers
        self.means = means
        self.restart_pass()


def _rows(layers):
    """Lists as arrays (1, channels), float64; None stays None."""
    return None if layers is None else [np.array([row]) for row in layers]


def run_tiled(network: TileNetwork, tiling: Tiling, volume: np.ndarray) -> np.ndarray:
    """A whole volume (depth, height, width), float32, tile by tile in memory."""
    scale, statistics = network.model.scale, Statistics()
    if network.model.statistic_layers and tiling.count > 1:
        for _ in statistics.collect(network, tiling, lambda tile: volume[tile.read]):
            pass
    finer = [n * s for n, s in zip(tiling.size, scale, strict=True)]
    result = np.empty(finer, np.float32)
    for tile in tiling.tiles:
        output = network(volume[tile.read], statistics.rows())
        result[tile.place(scale)] = output[tile.kept(scale)]
    return result
