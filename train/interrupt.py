"""Ctrl-C and SIGTERM that let the running step end."""

import os
import signal
import threading

MESSAGE = (
    b"\nStopping after this step, with a checkpoint; Ctrl-C once more stops at once.\n"
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the latter is what job schedulers send


class StopRequest:
    """A context in which the first Ctrl-C or SIGTERM only asks; the second one kills.

    Outside the main thread, where Python takes no signals, nothing changes.
    """

    def __init__(self):
        self.requested = False
        self.previous = {}

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self.requested

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.previous = {s: signal.signal(s, self._ask) for s in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _ask(self, *_):
        self.requested = True
        # The system's own handler ends the process without asking Python, which may be
        # deep in a compilation.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.write(2, MESSAGE)  # print could be interrupted in the middle of itself
