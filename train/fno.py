"""Train a Fourier neural operator: ``python -m train.fno --backend auto``.

The run's folder gets the files that `train.command` lists, the model with its
normalisers: what models.load and ``python -m train.predict`` take; and, where the data
was made here, samples.npz: test samples to try it on. Stopping, resuming and the exit
status are as told there.
"""

import sys

from train.command import Command
from train.fno_run import prepare
from train.fno_settings import FNOSettings


def run_name(options: FNOSettings) -> str:
    """The run's folder in runs/."""
    return "darcy" if options.data is None else options.data.stem


main = Command("train.fno", FNOSettings, run_name, prepare).main

if __name__ == "__main__":
    sys.exit(main())
