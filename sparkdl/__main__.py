"""The command line: ``python -m sparkdl``."""

from __future__ import annotations

import sys

from sparkdl.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
