"""The mover of a device whose flash tier is GPU-direct: nothing passes through host memory.

[Note: GPU-direct]
    An I/O is no work of a stream: it begins when it is submitted, and whatever it comes after must have
    ended before, as seen by the *host*. So rules 1 to 6 of [Note: streams] become:

    1. Out: the events of rule 1 are waited for by the thread of a lane, the *fence*, and only then is
       the write submitted. Nobody else waits.
    2. The source is held, and charged, until the write has ended; only then is ``written`` settled.
    3. No memory stands between, so none changes hands.
    4. Back: a fence waits for the event that was recorded when the target was allocated. Then the read
       is submitted.
    5. A read settles when its bytes are there, and are those that were written.
    6. A target is held until then. The stream that it was allocated on stays known, so that ``use`` by
       another one tells the allocator.

    A fence waits only for work that was enqueued before it was made, and no stream ever waits for an
    I/O: no cycle can arise.

[Note: no window]
    A storage of torch begins at a multiple of 512 bytes, files want multiples of 4096. Here exactly the
    data's own range is moved, in both directions. Out: what lies around a storage may be beyond the end
    of what CUDA has allocated, and kernels may be writing it; so it is not read, not even to be thrown
    away. Back: what lies around a target is somebody else's. Addresses and lengths that are no multiples
    are cuFile's to deal with (offsets in files are multiples always), and the trial in ``.gpu_direct``
    sees whether it does. So the target is an ordinary storage of exactly the data's length, which
    begins where the data begin (TRAPS rule 26), is charged as such, and is known to the allocator:
    ``record_stream`` works on it, where on a storage made from an address inside a larger block it
    would silently do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from penstock.runtime.cuda.direct_inbound import DirectInbound
from penstock.runtime.cuda.direct_outbound import DirectOutbound
from penstock.runtime.cuda.inbound import Inbound
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.outbound import Outbound


class DirectMover(CudaMover):
    """As :class:`CudaMover`, but for a flash tier that is GPU-direct. See [Note: GPU-direct]."""

    _outbound: ClassVar[type[Outbound]] = DirectOutbound
    _inbound: ClassVar[type[Inbound]] = DirectInbound

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[int]:
        """The address of device memory that nothing uses any more; waits for that."""
        storage = self._link.empty(nbytes, self.device)
        self._link.synchronize(self._link.record(self._link.current_stream(self.device)))
        yield storage.data_ptr()
