"""``python -m loadmaster`` is the command ``loadmaster``."""

import sys

from loadmaster.cli import main

if __name__ == "__main__":
    sys.exit(main())
