"""Ctrl-C that lets the running step end."""

import os
import signal
import threading

MESSAGE = (
    b"\nStopping after this step, with a checkpoint; Ctrl-C once more stops at once.\n"
)


class StopRequest:
    """A context in which the first Ctrl-C only asks, and the second one kills.

    Outside the main thread, where Python takes no signals, nothing changes.
    """

    def __init__(self):
        self.requested = False
        self.previous = None

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self.requested

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_):
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)

    def _ask(self, *_):
        self.requested = True
        # The system's own handler ends the process without asking Python, which may be
        # deep in a compilation.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, MESSAGE)  # print could be interrupted in the middle of itself
