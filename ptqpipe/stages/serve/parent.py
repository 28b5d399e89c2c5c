"""A process that ends with the one that started it, whatever that one dies of. Linux has a signal for it.

A thread that looks does the same elsewhere, and where the signal cannot be had. Must not know what the process is for.
"""

import ctypes
import os
import signal
import sys
import threading
import time

from ptqpipe.errors import PtqError

PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5


def end_with_parent(parent: int) -> None:
    """Ends this process when ``parent``, which started it, has gone; at once where it has gone already.

    The kernel's signal comes when the *thread* that started this process ends, so that must be one that stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # before the signal was asked for
        os._exit(PtqError.exit_code)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(PtqError.exit_code)

    threading.Thread(target=look, name="ptqpipe-parent", daemon=True).start()
