"""Keep the processes that read rows alive until the main process closes them or dies."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing import util

from unsloth_ddp.distributed.signals import PR_SET_PDEATHSIG, SIGNALS


class StayWithParent:
    """Begin the workers of a DataLoader (its worker_init_fn) so that only the process that made this ends them.

    Launchers and schedulers signal all processes of a job, but the main process may need more rows before it saves. If
    the main process dies, the worker must be killed, since it holds copies of its connections.
    """

    def __init__(self) -> None:
        self._closing = multiprocessing.get_context("fork").RawValue(ctypes.c_bool, False)
        # Both run before the exit handlers of torch (registered earlier) and multiprocessing, which wait for the
        # workers.
        atexit.register(self.close)
        util.Finalize(None, self.close, exitpriority=100)

    def close(self) -> None:
        """Let the workers end on a signal from now on."""
        self._closing.value = True
        atexit.unregister(self.close)

    def __call__(self, worker: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in SIGNALS:
            signal.signal(number, lambda *_: os._exit(0) if self._closing.value else None)
