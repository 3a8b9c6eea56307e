"""How many examples a test of a property tries.

``make test`` tries the same in every run, ``make test-all`` twice as many, and others each time.
"""

import os

IS_RANDOM = "PENSTOCK_TEST_RANDOM" in os.environ


def tries(count):
    """Return ``count`` for a run with random examples, and half of it otherwise."""
    return count if IS_RANDOM else (count + 1) // 2
