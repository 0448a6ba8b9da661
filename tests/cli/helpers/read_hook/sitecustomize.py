"""Makes something happen in the middle of a load, and not a moment earlier or later than a test needs it.

Python runs this file when it starts with the folder on its path. In a rank that has an action, the second
``os.preadv`` (or the READ_HOOK_CALL-th) finds what the action has done:

    truncate   the file that is being read has lost its second half
    kill       the process is killed, as the kernel does when memory is exhausted
    wait       the call does not return
    corrupt    one bit of what was read is another one
    say        two lines on standard error, as a library may write them
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_rank = os.environ.get("LOADMASTER_LOCAL_RANK", "")
_action = json.loads(os.environ.get("READ_HOOK_ACTIONS", "{}")).get(_rank)
_preadv = os.preadv
_calls = 0


def _hooked(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    global _calls
    _calls += 1
    if _calls != int(os.environ.get("READ_HOOK_CALL", "2")):
        return _preadv(descriptor, buffers, offset)
    folder = Path(os.environ["READ_HOOK_FOLDER"])
    (folder / f"rank{_rank}.partial").write_text(str(os.getpid()))
    (folder / f"rank{_rank}.partial").rename(folder / f"rank{_rank}")
    if _action == "truncate":
        os.truncate(Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size // 2)
    elif _action == "kill":
        while not all((folder / name).exists() for name in ("rank0", "rank1")):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)
    elif _action == "wait":
        time.sleep(100)
    elif _action == "say":
        print("a word from a library\nand another one", file=sys.stderr)
    count = _preadv(descriptor, buffers, offset)
    if _action == "corrupt":
        max(buffers, key=len)[0] ^= 1  # not a scale, whose last bit a narrower dtype does not have
    return count


if _action is not None:
    os.preadv = _hooked
