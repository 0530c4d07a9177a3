"""``python -m steadygrad``: the same program as the ``steadygrad`` command."""

import sys

from steadygrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
