"""Decision whether a session's flash tier is GPU-direct: only if a trial shows that it works.

The knob ``PENSTOCK_GPU_DIRECT`` says ``off``, ``on`` (or it is an error), or ``auto``: if it does not
work, transfers are staged in host memory, and the mark ``gpu_direct`` of the event log says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.io import cufile
from penstock.observe.recorder import Recorder

if TYPE_CHECKING:
    import torch

    from penstock.io.engine import Engine
    from penstock.runtime.cuda.link import CudaLink
    from penstock.store.base import Tier

Bytes: TypeAlias = NDArray[np.uint8]

TRIAL_BYTES: Final = 41 * MIB + 4096 + 1001
"""With ``expandable_segments`` torch maps device memory 20 MiB at a time, and libraries have failed on a
range that crosses from one mapping to the next: this one crosses twice, wherever it begins. And it ends
at a multiple of nothing, as tensors may."""
_SKEWS: Final = (0, 512)
"""Offsets of the trial in a storage, in bytes. If mappings end just between the pieces that
begin at the first, they do not for the second. (Storages of torch begin at multiples of 512.)"""


def open_flash(
    open_tier: Callable[[Engine], Tier],
    device: torch.device,
    link: CudaLink | None,
    recorder: Recorder,
) -> tuple[Engine, Tier] | None:
    """A flash tier that moves device memory, and its engine; ``None`` if host memory has to do.

    Args:
        open_tier: Opens the tier over an engine.
        device: The session's.
        link: To the device; ``None`` if its memory is the host's.
        recorder: Gets the mark.

    Raises:
        ConfigError: The knob says ``on``, and it does not work; says why. Or ``open_tier`` raises it.
    """
    wish = knobs.gpu_direct()
    if wish == "off" or (link is None and wish == "auto"):
        return None
    if link is None:
        opened, reason = None, f"device {str(device)!r} is no GPU"
    else:
        opened, reason = _try(open_tier, device, link, insist=wish == "on")
    if opened is None and wish == "on":
        raise ConfigError(
            f"PENSTOCK_GPU_DIRECT=on, but GPU-direct I/O cannot be used: {reason}; correct that, or"
            " set it to auto to go through host memory instead"
        )
    recorder.mark("gpu_direct", used=opened is not None, reason=reason)
    return opened


def _try(
    open_tier: Callable[[Engine], Tier], device: torch.device, link: CudaLink, *, insist: bool
) -> tuple[tuple[Engine, Tier] | None, str]:
    """Return what was opened, or ``None``, and how or why not."""
    found = cufile.available(ask_library=insist)
    if not found:
        return None, found.reason
    try:
        with link.within(link.current_stream(device)):  # the library may make a context
            engine = cufile.CuFileEngine(
                use_device=lambda owner: link.adopt_thread(getattr(owner, "device", device))
            )
    except ConfigError as error:  # it has worked a moment ago
        return None, str(error)
    try:
        tier = open_tier(engine)
    except BaseException:
        engine.close()
        raise
    reason = "interrupted"
    try:
        with tier.measured():
            reason = trial(tier, device, link)
    except Exception as error:  # noqa: BLE001  (a vendor's library may fail in any way)
        reason = f"{type(error).__name__}: {error}"
    finally:
        if reason:
            tier.close()
            engine.close()
    return (None, reason) if reason else ((engine, tier), found.reason)


def trial(tier: Tier, device: torch.device, link: CudaLink) -> str:
    """Write and read a little device memory through an unused tier: ``""``, or what came of it.

    Waits. That cuFile is there does not mean that it can do a directory's file system, or will do it
    for memory that is aligned as torch's is, and mapped as torch's is.

    Raises:
        Exception: It cannot be written, or not be read.
    """
    nbytes = min(TRIAL_BYTES, tier.spec.capacity_bytes)
    pattern = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    storage = link.empty(nbytes, device)
    for skew in _SKEWS:
        wrong = _round_trip(tier, storage, pattern, skew, link)
        if wrong:
            return f"{wrong} of {nbytes} bytes came back wrong from {tier.spec.where}"
    return ""


def _round_trip(
    tier: Tier, storage: torch.UntypedStorage, pattern: Bytes, skew: int, link: CudaLink
) -> int:
    """Write a storage from ``skew`` on, and read it back: how many bytes of all are wrong then."""
    nbytes, address = pattern.size - skew, storage.data_ptr() + skew
    stream = link.current_stream(storage.device)
    found = np.zeros_like(pattern)
    link.copy_in(stream, storage, pattern.ctypes.data)
    link.synchronize(link.record(stream))
    ticket = tier.write(address, nbytes, keep_alive=storage, label="GPU-direct trial")
    try:
        ticket.written.wait()
        link.copy_in(stream, storage, found.ctypes.data)
        link.synchronize(link.record(stream))
        tier.read(ticket, address, keep_alive=storage).wait()
    finally:
        tier.discard(ticket)
    link.copy_out(stream, storage, found.ctypes.data)
    link.synchronize(link.record(stream))
    return int((found[skew:] != pattern[skew:]).sum()) + int(np.count_nonzero(found[:skew]))
