"""A program that starts ranks which wait for ever, prints their process numbers, and is then ended by a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parents[2]))

from launch.helpers.rank_functions import ACT
from loadmaster.launch.spawn import run_ranks


def main() -> None:
    """Run as many ranks as the argument says."""
    ranks = int(sys.argv[1])
    environment = dict(os.environ)
    try:
        run_ranks(
            ACT,
            [("wait", None)] * ranks,
            environments=[environment] * ranks,
            on_progress=lambda rank, process: print(process, flush=True),
        )
    except KeyboardInterrupt:
        sys.exit(7)


if __name__ == "__main__":
    main()
