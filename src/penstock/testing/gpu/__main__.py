"""Run the checks of a machine with a GPU."""

import sys

from penstock.testing.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
