"""`python -m loopformers`: the same as the command `loopformers`."""

from __future__ import annotations

import sys

from loopformers.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
