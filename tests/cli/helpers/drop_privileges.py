"""Run a program for which the mode of a file counts though it runs as root: ``drop_privileges.py WORD...``."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2


def main(words: Sequence[str]) -> None:
    """Take from what the next program may have what lets root read any file, and run it."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        if prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "the capability could not be dropped")
    os.execv(words[0], list(words))


if __name__ == "__main__":
    main(sys.argv[1:])
