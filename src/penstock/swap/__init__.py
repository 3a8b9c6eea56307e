"""One job's memory, to flash and back, in its process: suspended between two steps, and resumed.

``suspend`` is the entrance, ``swap_out`` and ``swap_in`` do it; ``recall`` takes from a checkpoint what
that has. ``signals`` and ``channel`` are how a script that knows nothing of it is told, and
``resume_record`` is what outlives its process.
"""

from typing import Final

RECORD_FILE: Final = "run.json"
"""What a state directory of ``penstock run --state`` has; see :mod:`.resume_record`."""
