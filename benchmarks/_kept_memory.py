"""Have the C library keep what is freed, for every mode that is compared.

On a virtual machine that reports free pages to its host, a page that has been free for about a second is
taken away, and touching it again costs 5 s for a GiB instead of 0.1 s. Large tensors are mapped when they
are made and unmapped when they are freed, so a step then takes as long as it was lucky. With these
settings freed memory stays in the process. They are read when a process starts, so it is started again.
"""

import os
import sys

SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",  # as `penstock run` does
}


def start_again():
    """With these settings, unless they are in force. Call it before torch is imported."""
    if any(name not in os.environ for name in SETTINGS):
        os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
        os.execv(sys.executable, [sys.executable, *sys.argv])


def in_force():
    """For a result's configuration."""
    return {name: os.environ.get(name) for name in SETTINGS}
