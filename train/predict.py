"""Apply a saved model to a file: ``python -m train.predict MODEL DATA``.

The outputs go to an .npz file, whole or not at all:

    prediction    (samples, *grid, out_channels) float32, in physical units
    relative_l2   (samples,) float64, where DATA has targets; likewise relative_h1

The grid may differ from the one of training. Exit status: 0, or 2 for a mistake in the
options or the files, or 130 for Ctrl-C.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro
from rich.console import Console

from jaxops.backend import BackendError, select_backend
from models import load
from models.atomic import replace_file
from train import folder as files
from train import metrics
from train.data import read_inputs, read_pairs
from train.datasets import grid_text, has_targets
from train.loop import make_forward
from train.normalise import UnitGaussian
from train.picture import Row, draw
from train.report import error_table
from train.settings import parse

PICTURE_ROWS = 3


@dataclass(frozen=True)
class PredictSettings:
    """Apply a saved model to the inputs in a file.

    Where the file has targets too, the errors are printed and saved.
    """

    model: tyro.conf.Positional[Path]
    """A model.safetensors, a checkpoint, or the folder of a finished run."""

    data: tyro.conf.Positional[Path]
    """File of inputs, with or without targets: .pt, .npz, .mat or HDF5."""

    out: Path | None = None
    """Where the outputs go; by default DATA's name with -prediction.npz, here."""

    picture: Path | None = None
    """A PNG to draw of the first samples."""

    backend: Literal["auto", "cpu", "gpu", "metal"] = "auto"
    """Device to run on; auto takes the best that is there."""

    batch_size: int = 16
    """Samples at once."""

    h1_periodic: bool = True
    """Slopes in the H1 error are taken around the ends of each axis; with the flag they
    are one-sided there."""

    input_key: str | None = None
    """Name of the inputs in the file; found by itself where the names are usual."""

    target_key: str | None = None
    """Name of the targets in the file."""

    subsample: int = 1
    """Keep every r-th point of each axis."""

    channel_axis: Literal["auto"] | int | None = "auto"
    """Axis of the channels in the file: auto, an axis, or None where there is none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict as the command line says; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(PredictSettings, "train.predict", arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    try:
        predict(options, console)
    except (ValueError, OSError, BackendError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; nothing was written.", file=sys.stderr)
        return 130
    return 0


def predict(options: PredictSettings, console: Console) -> None:
    """Read, predict, write.

    Raises:
        BackendError: if the backend cannot be had.
        ValueError, OSError: if model and data cannot be read or do not fit each other,
            or an output cannot be written.
    """
    out = options.out or Path(f"{options.data.stem}-prediction.npz")
    _check_outputs(options, out)
    console.print(f"backend  {select_backend(options.backend)}")
    model, variables, extra = load(files.model_file(options.model))
    inputs, targets = _read(options, model, extra)
    _check_channels(options, model, inputs, targets)
    size = f"{len(inputs)} samples of {grid_text(inputs.shape[1:-1])}"
    console.print(f"data     {options.data}: {size}, targets: {_yes(targets)}")

    forward = make_forward(
        model,
        _normaliser(extra, "input_normaliser"),
        _normaliser(extra, "target_normaliser"),
    )

    @jax.jit
    def of_batch(variables, inputs, *targets):
        prediction, _ = forward(variables, inputs)
        norms = [
            metrics.error_norms(prediction, t, options.h1_periodic) for t in targets
        ]
        return {"prediction": prediction, "norms": norms}

    fields = (inputs,) if targets is None else (inputs, targets)
    results = list(
        metrics.batchwise(
            lambda *batch: of_batch(variables, *batch), fields, options.batch_size
        )
    )
    arrays = {
        "prediction": np.concatenate([result["prediction"] for result in results])
    }
    wrong = int(np.count_nonzero(~np.isfinite(arrays["prediction"])))
    if wrong:
        raise ValueError(
            f"{wrong} of {arrays['prediction'].size} predicted values are not finite. "
            "Look for extreme values in the data, or NaN in the model's weights."
        )
    if targets is not None:
        errors = metrics.sample_errors([result["norms"][0] for result in results])
        arrays |= {"relative_l2": errors.l2, "relative_h1": errors.h1}
        summary = {"samples": len(inputs), **metrics.summary(errors)}
        console.print(error_table({options.data.name: summary}))
    with replace_file(out) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)
    console.print(f"wrote    {out}")
    if options.picture is not None:
        draw(options.picture, _rows(inputs, targets, arrays), _title(model, options))
        console.print(f"wrote    {options.picture}")


def _check_outputs(options, out):
    """Refuse outputs that cannot be written, or that would replace what is read."""
    read = [path.resolve() for path in (files.model_file(options.model), options.data)]
    if options.picture is not None and options.picture.resolve() == out.resolve():
        raise ValueError(f"--out and --picture must be two files; both are {out}.")
    for path in (out, options.picture):
        if path is None:
            continue
        if path.resolve() in read:
            raise ValueError(f"An output must not replace what is read; got {path}.")
        files.check_writable(path.parent)
        if path.is_dir():
            raise ValueError(f"An output must be a file; {path} is a folder.")
    if options.picture is not None and options.picture.suffix.lower() != ".png":
        raise ValueError(f"--picture must end in .png; got {options.picture}.")


def _check_channels(options, model, inputs, targets):
    for name, array in (("in", inputs), ("out", targets)):
        wanted = getattr(model, f"{name}_channels", None)
        if array is not None and wanted not in (None, array.shape[-1]):
            raise ValueError(
                f"{options.data} has {array.shape[-1]} {name}put channels; the model "
                f"has {wanted}. If they were read wrongly, say where the channels are: "
                "--channel-axis."
            )


def _read(options, model, extra):
    """Inputs, and targets or None; the model settles how many axes and channels."""
    num_axes = len(model.n_modes) if hasattr(model, "n_modes") else None
    how = {
        "input_key": options.input_key,
        "subsample": options.subsample,
        "channel_axis": options.channel_axis,
        "grid_ndim": num_axes,
    }
    if has_targets(options.data, options.input_key, options.target_key):
        pairs = read_pairs(options.data, target_key=options.target_key, **how)
        return pairs.inputs, pairs.targets
    num_channels = getattr(model, "in_channels", None)
    return read_inputs(options.data, num_channels=num_channels, **how), None


def _normaliser(extra, name):
    """A normaliser saved with the model; None for a model that has none."""
    if name not in extra:
        return None
    if not isinstance(extra[name], dict):
        raise ValueError(f"The model's {name} must be a mean and a std; it is not.")
    return UnitGaussian.from_dict(extra[name])


def _rows(inputs, targets, arrays):
    count = min(PICTURE_ROWS, len(inputs))
    return [
        Row(
            f"sample {i}",
            inputs[i],
            arrays["prediction"][i],
            None if targets is None else targets[i],
            None if targets is None else float(arrays["relative_l2"][i]),
        )
        for i in range(count)
    ]


def _title(model, options):
    return f"{type(model).__name__} on {options.data.name}"


def _yes(targets):
    return "no" if targets is None else "yes"


if __name__ == "__main__":
    sys.exit(main())
