"""What tests share: hypothesis without a stop watch, a directory on a disk, sessions that spill
there, GPU tests on GPUs, one thread for kernels.

``PENSTOCK_TEST_DIR`` names the directory to spill below; without it, it is pytest's own, or
``/var/tmp`` where that is in memory.
"""

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

from idle_watch import IdleWatch, SilenceWatch, leave_pipe_to_worker
from penstock.core.fs import filesystem_of
from tries import IS_RANDOM, tries

# Before torch is loaded: tests run side by side, and with little tensors threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# However glibc is told to behave here; tests of the heap say so.
os.environ.setdefault("PENSTOCK_RESTORE_INTO", "arena")

try:
    from hypothesis import settings
except ImportError:  # scripts/gpu_check runs with what is there, and tests/gpu does without
    pass
else:
    # a busy machine is no failure
    settings.register_profile(
        "penstock", deadline=None, derandomize=not IS_RANDOM, max_examples=tries(100)
    )
    settings.load_profile("penstock")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # one of pytest-xdist's
        config.pluginmanager.register(IdleWatch())
        leave_pipe_to_worker(config)
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(SilenceWatch())


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Indexes of data sets, here and in what is started: a user's own would be found again by path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("indexes")))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_looked_through():
    """Sessions look at all objects there are, and collections too: of modules there are a million."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def collected_account():
    """The process's account without what earlier tests left: killed saves, and errors of data sets.

    A save that is killed frees nothing, as in a process that is; an error in a thread of a loader has the
    frames of that thread in its traceback, and these the loader, until a collection.
    """
    gc.collect()


@pytest.fixture
def default_signals():
    """Ctrl-C and a hang-up do what they do by default, here and in what is started.

    A parent may have them ignored: a shell that is not interactive does so with SIGINT for what it
    begins in the background, and ``nohup`` with SIGHUP.
    """
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, default) for number, default in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def disk_path(tmp_path):
    """A fresh directory that a flash tier accepts, also where ``/tmp`` is in memory."""
    named = os.environ.get("PENSTOCK_TEST_DIR")
    if named is None and not filesystem_of(tmp_path).is_memory:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=named or "/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def small_knobs(monkeypatch):
    """Slabs and pieces of a size that suits tensors of a test."""
    monkeypatch.setenv("PENSTOCK_SLAB", "16MiB")
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "256KiB")
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "2")


@pytest.fixture
def one_thread():
    """Little tensors are computed quicker by one thread than by several that wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def patient(monkeypatch):
    """Backward begins when all writes have ended, so that what was written really has to come back.

    On a busy machine it is needed before its write has begun now and then, and stays.
    """
    from offload_runs import wait_until
    from penstock.hooks.saved_tensors import SavedTensorHooks

    unpack = SavedTensorHooks.unpack

    def wait_and_unpack(self, packed):
        wait_until(lambda: not self._holder.inspect("it").writes, "all writes have ended")
        return unpack(self, packed)

    monkeypatch.setattr(SavedTensorHooks, "unpack", wait_and_unpack)


@pytest.fixture
def session_for(disk_path, small_knobs, one_thread):
    """``session_for(model, optimizer, **settings)``: a session on a disk; see ``offload_runs``.

    Policy ``all`` and a floor of 8 KiB unless told otherwise. One that is left open is closed.
    """
    from offload_runs import session_in

    made = []

    def make(model=None, optimizer=None, **settings):
        made.append(session_in(disk_path, model, optimizer, **settings))
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.fixture
def everything(session_for, monkeypatch):
    """An open session in which every saved tensor moves, however small; see ``operator_runs``."""
    from operator_runs import Everything

    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    with session_for(codec="none", floor=1) as session:
        yield Everything(session, monkeypatch)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
