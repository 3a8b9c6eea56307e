"""Suspending a job between two steps, by moving its memory to flash, and resuming it.

``suspend`` is the entry point, ``swap_out`` and ``swap_in`` do the work; ``recall`` restores memory from
a checkpoint. ``signals`` and ``channel`` suspend a script without changes to it, with
``sleep_agreement`` all ranks of a job at once. ``resume_record`` is the state that outlives its process.
"""

from typing import Final

RECORD_FILE: Final = "run.json"
"""Name of the record in a state directory of ``penstock run --state``; see :mod:`.resume_record`."""
