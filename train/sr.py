"""Train a super-resolution network on volumes: ``python -m train.sr DATA...``.

The run's folder gets the files that `train.command` lists: a model that models.load and
``python -m train.upscale`` take; prediction.png with slices in three planes and the
Fourier shell correlation. Stopping, resuming and the exit status are as told there.
"""

import sys

from train.command import Command
from train.sr_run import prepare
from train.sr_settings import SRSettings


def run_name(options: SRSettings) -> str:
    """The run's folder in runs/."""
    return options.data[0].resolve().stem if options.data else "synthetic"


main = Command("train.sr", SRSettings, run_name, prepare).main

if __name__ == "__main__":
    sys.exit(main())
