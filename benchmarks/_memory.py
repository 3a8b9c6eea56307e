"""Memory that a benchmark frees stays with it, so that to touch it again takes no longer than it should.

On a virtual machine with free page reporting what is given back to the kernel soon goes back to the host.
To touch it again then takes some seconds per GiB, in whichever mode comes next. Here the C library keeps
what is freed. It looks at its settings when a process starts, so the process starts anew.
"""

import os
import sys

SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def keep_freed():
    """Start this script again with ``SETTINGS``, unless it has them. Call it first.

    Returns:
        The settings, for the result's configuration.
    """
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.environ.update(SETTINGS)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    return dict(SETTINGS)
