"""Ctrl-C: asks once, kills the second time, and is itself again afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from train.interrupt import StopRequest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal
from train.interrupt import StopRequest
with StopRequest() as should_stop:
    os.kill(os.getpid(), signal.SIGINT)
    print(should_stop(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still there", flush=True)
"""


def test_the_first_asks_and_the_second_kills():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "True\n"
    assert "Ctrl-C once more" in done.stderr


def test_the_handler_of_before_comes_back():
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        with StopRequest() as should_stop:
            assert not should_stop()
            os.kill(os.getpid(), number)
            assert should_stop()
        assert signal.getsignal(number) == before
