"""The child's end of its line to the parent; see `loadmaster.process.child`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

__all__ = ["open_line"]


def open_line() -> Connection:
    """Return the line of this process to its parent, and prepare the process for its life as a child."""
    faulthandler.enable()
    # Ctrl-C reaches the whole process group; the parent alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    # The line is this process's alone: no child of it, which a library may start, holds it open.
    os.set_inheritable(connection.fileno(), False)
    os.register_at_fork(after_in_child=connection.close)
    return connection
