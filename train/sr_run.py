"""A run that trains a super-resolution network on volumes."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxops import resize
from jaxops.backend import to_device
from models import save
from train import folder as files
from train.command import quoted
from train.data.patches import PatchSet
from train.loop import (
    NonFiniteLossError,
    TrainState,
    compile_train_step,
    create_state,
    make_forward,
    make_optimizer,
    make_train_step,
)
from train.normalise import PERCENTILES
from train.report import MetricsWriter
from train.run import Outcome, Run
from train.sr_settings import SRSettings
from train.tile_network import TileNetwork, run_tiled
from train.tile_plan import choose_tiling
from train.volume_losses import LOSSES
from train.volume_metrics import nrmse, psnr, shell_correlation, ssim
from train.volume_picture import draw
from train.volume_sets import HeldOut, VolumeSets, data_range, load_sets

FOLLOWED_VOXELS = 2**20  # high-resolution voxels tested on after an epoch, in all
WHOLE_VOXELS = 2**19  # low-resolution voxels that the network takes at a time


def prepare(
    options: SRSettings, folder: Path, console: Console
) -> tuple[Run, TrainState]:
    """A run and its fresh state.

    Raises:
        ValueError, OSError: if data or settings are not fit for training.
    """
    sets = load_sets(options)
    for line in sets.lines:
        console.print(line)
    model = options.network.make(sets.scale)
    scale = " x ".join(map(str, sets.scale))
    radius = " x ".join(map(str, model.receptive_radius))
    console.print(
        f"model    {type(model).__name__}, scale {scale}, looks {radius} voxels far"
    )
    patches = PatchSet(
        sets.pairs,
        scale=sets.scale,
        patch=options.patch,
        intensity=sets.ranges,
        degradation=sets.degradation,
        augment=options.augment,
        keep_empty=options.keep_empty,
    )
    console.print(f"patches  {patches}")
    optimizer = make_optimizer(
        options.learning_rate,
        options.steps * options.epochs,
        options.weight_decay,
        options.warmup,
        options.gradient_clip,
    )
    forward = make_forward(model, None, None)
    enlarge = Enlarger(model)
    followed = _followed(sets)

    def draw_batch(epoch, batch):
        return patches.draw(options.seed, epoch, batch, options.batch_size)

    def test(state):
        return _errors(enlarge, state, followed)

    def finish(run, state, log, console):
        return _finish(run, state, enlarge, sets, log, console)

    loss = LOSSES[options.loss]
    step = make_train_step(forward, optimizer, loss, options.micro_batch)
    run = Run(
        options,
        folder,
        model,
        compile_train_step(step),
        draw_batch,
        options.steps,
        test=test,
        criterion="rmse",
        tell=_told,
        kept={
            "intensity": sets.intensity.to_dict(),
            "target_intensity": sets.target_intensity.to_dict(),
            "percentiles": PERCENTILES,
        },
        data_digest=sets.digest,
        finish=finish,
    )
    shape = (options.batch_size, *patches.patch, 1)
    return run, create_state(model, optimizer, shape, options.seed)


@dataclass(frozen=True)
class Enlarger:
    """Encoded volumes enlarged by the network, and by cubic interpolation."""

    model: Any

    @functools.cached_property
    def _apply(self):
        return jax.jit(self.model.apply)

    @functools.cached_property
    def _tiles(self):
        return functools.cache(lambda depth: TileNetwork(self.model, {}, depth))

    def __call__(self, state: TrainState, low: np.ndarray) -> np.ndarray:
        """(z, y, x) float32 to the same, larger, on the host; in tiles where large."""
        if low.size <= WHOLE_VOXELS:
            return np.asarray(self._apply(state.variables, _batch(low)))[0, ..., 0]
        network = self._tiles(low.shape[0])
        network.variables = state.variables

        def share(window):
            return math.prod(window) / WHOLE_VOXELS

        reach = self.model.receptive_radius, self.model.stride
        tiling = choose_tiling(low.shape, *reach, share, share)
        return run_tiled(network, tiling or network.tiling(low.shape, low.shape), low)

    def cubic(self, low: np.ndarray) -> np.ndarray:
        """The same, by interpolation alone."""
        sizes = [n * s for n, s in zip(low.shape, self.model.scale, strict=True)]
        return np.asarray(_cubic(_batch(low), tuple(sizes)))[0, ..., 0]


@functools.partial(jax.jit, static_argnums=1)
def _cubic(x, sizes):
    return resize.cubic(x, sizes)


def _batch(volume):
    return to_device(volume[None, ..., None])


def _followed(sets: VolumeSets) -> list[HeldOut]:
    """Parts of the volumes held out, small enough to test on after each epoch."""
    budget = max(FOLLOWED_VOXELS // len(sets.tests), 1)
    chosen = []
    for volume in sets.tests[:16]:
        shape = list(volume.low.shape)
        while math.prod(shape) * math.prod(sets.scale) > budget and max(shape) > 16:
            longest = int(np.argmax(shape))
            shape[longest] = max(16, shape[longest] // 2)
        begin = [(n - s) // 2 for n, s in zip(volume.low.shape, shape, strict=True)]
        low = tuple(slice(b, b + s) for b, s in zip(begin, shape, strict=True))
        high = tuple(
            slice(part.start * s, part.stop * s)
            for part, s in zip(low, sets.scale, strict=True)
        )
        known = volume.is_finite
        if known is not None:
            known = known[high] if known[high].any() else np.ones_like(known[high])
        chosen.append(HeldOut(volume.name, volume.low[low], volume.high[high], known))
    return chosen


def _errors(enlarge, state, volumes):
    """Root mean squared error and PSNR over volumes, and PSNR of cubic interpolation.

    Numbers that are infinite, as of volumes without a structure, are None.
    """
    rows = []
    for volume in volumes:
        ours = enlarge(state, volume.low)
        _check(ours, volume.name, state)
        truth, ours, cubic = _known(volume, ours, enlarge.cubic(volume.low))
        error = np.sqrt(np.mean(np.square(truth - ours, dtype=np.float64)))
        values = [psnr(truth, image, data_range(truth)) for image in (ours, cubic)]
        rows.append((float(error), *values))
    names = ("rmse", "psnr", "psnr_cubic")
    return dict(zip(names, map(_finite, np.mean(rows, axis=0)), strict=True))


def _known(volume, *images):
    """The truth and images, where the truth is known."""
    if volume.is_finite is None:
        return volume.high, *images
    return [image[volume.is_finite] for image in (volume.high, *images)]


def _finite(value):
    return float(value) if np.isfinite(value) else None


def _told(errors):
    if None in errors.values():
        return f"error {errors['rmse']:.5f}"
    gain = errors["psnr"] - errors["psnr_cubic"]
    return f"PSNR {errors['psnr']:.2f} dB ({gain:+.2f} over cubic)"


def _check(volume, name, state):
    if not np.isfinite(volume).all():
        raise NonFiniteLossError(
            f"The network's output for {name} is not finite after step "
            f"{int(state.step)}. Lower --learning-rate."
        )


def _scores(volume, image, curve):
    """What metrics.jsonl and the model carry of one image; None for what is infinite
    or not defined."""
    truth, known = _known(volume, image)
    largest, is_whole = data_range(truth), volume.is_finite is None
    return {
        "psnr": _finite(psnr(truth, known, largest)),
        "ssim": _finite(ssim(volume.high, image, largest)) if is_whole else None,
        "nrmse": _finite(nrmse(truth, known)) if np.any(truth) else None,
        "resolution": _finite(curve.resolution) if is_whole else None,
    }


def _row(scores, curve):
    """Scores as a line of the table."""
    styles = {"psnr": "9.2f", "ssim": "6.4f", "nrmse": "6.4f", "resolution": "10"}
    texts = {**scores, "resolution": scores["resolution"] and str(curve)}
    return "  ".join(
        f"{'-':>{style.split('.')[0]}}"
        if texts[name] is None
        else f"{texts[name]:>{style}}"
        for name, style in styles.items()
    )


def _finish(
    run: Run,
    state: TrainState,
    enlarge: Enlarger,
    sets: VolumeSets,
    log: MetricsWriter,
    console: Console,
) -> Outcome:
    """Test on all that was held out; write the model and, last of all, the picture."""
    tests, pictured = {}, None
    lines = [f"{'held out':28}          PSNR (dB)    SSIM   NRMSE  resolution"]
    for number, volume in enumerate(sets.tests):
        shown = {
            "input": volume.low,
            "cubic": enlarge.cubic(volume.low),
            "ours": enlarge(state, volume.low),
            "truth": volume.high,
        }
        _check(shown["ours"], volume.name, state)
        results, curves = {}, {}
        for name in ("cubic", "ours"):
            curves[name] = shell_correlation(volume.high, shown[name], sets.voxel_size)
            results[name] = _scores(volume, shown[name], curves[name])
            row = _row(results[name], curves[name])
            lines.append(f"{volume.name[:28]:28}  {name:6}  {row}")
        log.write(
            event="test",
            volume=volume.name,
            shape=volume.high.shape,
            **{f"{k}_{n}": v for n, r in results.items() for k, v in r.items()},
            frequency=curves["ours"].frequency.tolist(),
            **{f"fsc_{n}": c.correlation.tolist() for n, c in curves.items()},
        )
        tests[str(number)] = {"volume": volume.name, **results}
        pictured = pictured or (shown, curves)
    lines[0] += f" ({sets.unit})"
    for line in lines:
        console.print(line)
    model = run.folder / files.MODEL
    save(model, run.model, jax.device_get(state.variables), **run.extra(), tests=tests)
    picture = run.folder / files.PICTURE
    title = f"{type(run.model).__name__}, {run.folder.name}: {sets.tests[0].name}"
    draw(picture, *pictured, title, sets.unit, sets.voxel_size)
    return Outcome(
        {
            model: "the model and its intensity range",
            picture: "slices of what was held out, and how well scales agree",
            run.folder / files.METRICS: "loss and errors, epoch by epoch",
        },
        [f"python -m train.upscale {quoted(model)} VOLUME.tif OUT.tif"],
    )
