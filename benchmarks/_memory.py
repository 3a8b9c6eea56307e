"""Memory that stays with the process, so that step times can be compared.

A virtual machine with free page reporting returns pages that have been free for a second or so to its
host, and touching them again takes some 5 s per GiB in place of 0.1 s (``penstock doctor`` tells where
that is so). A step then pays for what another mode freed a moment ago. glibc can be told to keep what
is freed; machines without that feature lose nothing by it.
"""

import os
import sys

KEEPS = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",  # as `penstock run` does
}


def keep_what_is_freed() -> None:
    """Start this script again with these settings, unless it has them."""
    if any(os.environ.get(name) != value for name, value in KEEPS.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEPS)
