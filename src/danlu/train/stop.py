"""SIGTERM and Ctrl-C end a run after the step it is in, with a checkpoint.

The handler only remembers the signal; the ranks agree at the next step's start (a signal may reach one of them only).
A second Ctrl-C ends the process at once. One Ctrl-C can arrive twice, from the terminal (or a scheduler that signals
every process) and from the launcher that passes it on; what follows within a second is therefore the same one.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SAME_SIGNAL_SECONDS = 1.0


class StopSignal:
    """Context manager that catches SIGTERM and SIGINT; ``received`` names the signal or is None.

    Outside the main thread, where Python cannot install handlers, it catches nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._received_at > _SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
