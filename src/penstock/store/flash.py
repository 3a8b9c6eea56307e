"""A tier in files on one or several directories. Where bytes go: :mod:`penstock.store.striping`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.core import knobs
from penstock.core.errors import ConfigError, TransferError
from penstock.core.fs import check_directories, check_space
from penstock.core.process import release_in_child
from penstock.core.units import format_bytes
from penstock.io.engine import Engine
from penstock.io.files import open_unlinked, open_unlinked_buffered
from penstock.observe.recorder import Recorder
from penstock.store.base import TierSpec
from penstock.store.blob import FileTier, StrPath
from penstock.store.checksums import Kind
from penstock.store.slabs import UNIT_BYTES, SlabDirectory
from penstock.store.striping import FlashPlace, StripedSpace


class FlashTier(FileTier):
    """Spills to files in one or several directories.

    The files have no name and mode 0600: nothing remains, whatever ends the process. Space is
    claimed slab by slab, as it is first needed, and overwritten in place from then on. If the file
    system fills up meanwhile, a write raises NoSpaceError; what the tier has claimed stays usable.
    A failed transfer leaves the tier usable.
    """

    def __init__(
        self,
        directories: StrPath | Sequence[StrPath],
        *,
        capacity_bytes: int,
        engine: Engine,
        recorder: Recorder,
        name: str = "flash",
        allow_memory_filesystem: bool = False,
        verify: Kind | None = None,
    ) -> None:
        """Check the directories and open a file in each; claim no space yet.

        Args:
            directories: Where to spill: one directory, or several to spread every write over.
            capacity_bytes: The most to hold; each directory gets an equal part of it. What is
                written takes multiples of 4 KiB.
            engine: Moves the bytes. It is not closed with the tier. If it is GPU-direct, so is the
                tier: addresses are those of device memory, and there is no granule.
            recorder: Gets counters and spans.
            name: As in plans, logs and traces.
            allow_memory_filesystem: Accept directories on tmpfs, where spilling saves no memory.
            verify: How much checksums cover; as ``knobs.verify()`` says if None.

        Raises:
            ConfigError: A directory is missing, named twice, not writable or in memory, or the
                capacity is too small.
            NoSpaceError: A file system has less free space than the tier could come to need of it.
        """
        paths = check_directories(
            directories, "flash directory", allow_memory_filesystem=allow_memory_filesystem
        )
        quotas = _quotas(capacity_bytes, paths)
        check_space(
            zip(paths, quotas, strict=True),
            f"lower its capacity of {format_bytes(sum(quotas))}, free some space, or name another"
            " directory",
        )
        slabs = _open_all(paths, quotas, gpu_direct=engine.spec.gpu_direct)
        spec = TierSpec(
            name=name,
            kind="flash",
            capacity_bytes=sum(quotas),
            granule_bytes=math.lcm(*(each.granule_bytes for each in slabs)),
            where=", ".join(paths),
            gpu_direct=engine.spec.gpu_direct,
        )
        super().__init__(spec, engine=engine, recorder=recorder, verify=verify)
        self._space = StripedSpace(slabs, stripe_bytes=knobs.stripe_bytes())
        # a child's descriptors would keep the space taken after this process
        release_in_child(self._space, StripedSpace.close_files)

    @property
    def claimed_bytes(self) -> int:
        """Bytes of the file systems that the tier's files take now."""
        return self._space.claimed_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of the capacity in use: held bytes, each ticket's rounded up to 4 KiB."""
        return self._space.taken_bytes

    def _allocate(self, nbytes: int) -> FlashPlace:
        return self._space.allocate(nbytes)

    def _discard(self, place: FlashPlace) -> None:
        self._space.release(place)

    def _close(self) -> None:
        self._space.close()


def _quotas(capacity_bytes: int, paths: Sequence[str]) -> list[int]:
    """Equal parts of the capacity, in whole units; the first ones get what is left over."""
    units, count = capacity_bytes // UNIT_BYTES, len(paths)
    if units < count:
        raise ConfigError(
            f"a flash tier of {capacity_bytes} bytes has less than {UNIT_BYTES} bytes for each"
            f" of its {count} directories ({', '.join(paths)}); raise its capacity"
        )
    return [(units // count + (index < units % count)) * UNIT_BYTES for index in range(count)]


def _open_all(
    paths: Sequence[str], quotas: Sequence[int], *, gpu_direct: bool
) -> list[SlabDirectory]:
    open_file = open_unlinked_buffered if gpu_direct else open_unlinked
    slab_bytes = knobs.slab_bytes()
    slabs: list[SlabDirectory] = []
    try:
        for path, quota in zip(paths, quotas, strict=True):
            slabs.append(
                SlabDirectory(path, quota_bytes=quota, slab_bytes=slab_bytes, open_file=open_file)
            )
    except TransferError as error:
        for each in slabs:
            each.close()
        raise ConfigError(f"flash directory {path!r} cannot be used: {error}") from error
    return slabs
