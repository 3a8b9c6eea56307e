"""One engine in a process, for all products."""

import multiprocessing
import os
import threading

import pytest

from penstock import checkpoint, offload
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.data import FlashDataset
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.optim import FlashAdamW
from penstock.runtime.stores import ranks_on_flash
from penstock.store import engine as module
from penstock.store.engine import replace_shared_engine, share_flash, shared_engine
from penstock.swap.space import SwapSpace
from penstock.testing.shared_engine import shared_engine_replaced

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def test_it_is_made_once_however_many_threads_ask():
    found, ready = [], threading.Barrier(8)

    def ask():
        ready.wait(10)
        found.append(shared_engine())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_whoever_asks_after_a_knob_was_changed_gets_another(monkeypatch):
    before = shared_engine()
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "64KiB")
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "3")
    changed = shared_engine()
    assert changed is not before
    assert (changed.spec.workers, changed.spec.piece_bytes % (64 << 10)) == (3, 0)
    assert shared_engine() is changed
    monkeypatch.setenv("PENSTOCK_IO_ENGINE", "threads")
    assert shared_engine().spec.name == "threads"
    monkeypatch.setenv("PENSTOCK_IO_ENGINE", "none")
    with pytest.raises(ConfigError, match="PENSTOCK_IO_ENGINE"):
        shared_engine()


def test_ranks_on_one_machine_divide_its_depth(monkeypatch, tmp_path):
    assert shared_engine().spec.workers == 6
    numbers = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, number in numbers.items():
        monkeypatch.setenv(name, str(number))
    assert shared_engine().spec.workers == 3
    share_flash(1)
    try:
        assert shared_engine().spec.workers == 6
        share_flash(16)
        assert shared_engine().spec.workers == 2
        monkeypatch.setenv("PENSTOCK_IO_THREADS", "5")
        assert shared_engine().spec.workers == 5
    finally:
        share_flash(None)


def test_ranks_on_other_file_systems_do_not_count(monkeypatch, disk_path):
    numbers = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name, number in numbers.items():
        monkeypatch.setenv(name, str(number))
    other = "/dev/shm"
    if not os.path.isdir(other) or os.stat(other).st_dev == disk_path.stat().st_dev:
        pytest.skip("there is no other file system")
    ranks = {}
    for by_rank in (False, True):
        for flash in ((disk_path, other), (disk_path,), (disk_path, disk_path / "a")):
            config = OffloadConfig(flash=flash, flash_by_rank=by_rank)
            ranks[by_rank, len(flash), flash[-1] == other] = ranks_on_flash(config)
    (disk_path / "a").mkdir()
    assert ranks_on_flash(OffloadConfig(flash=flash, flash_by_rank=True)) == 4
    assert ranks == {
        **{(False, number, alone): 4 for number, alone in ((2, True), (1, False), (2, False))},
        (True, 2, True): 2,
        (True, 1, False): 4,
        (True, 2, False): 1,  # that directory is missing
    }


def test_a_session_with_a_directory_of_its_own_divides_by_those_that_share_it(
    monkeypatch, disk_path
):
    numbers = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, number in numbers.items():
        monkeypatch.setenv(name, str(number))
    flash = [disk_path / name for name in ("a", "b")]
    for each in flash:
        each.mkdir()
    monkeypatch.setattr("penstock.session.ranks_on_flash", lambda _: 1)
    with offload(flash=flash, flash_by_rank=True, flash_capacity="64MiB") as session:
        assert session.directories == (str(flash[1]),)
        assert shared_engine().spec.workers == 6
    assert shared_engine().spec.workers == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_even_if_the_lock_was_held():
    parents = shared_engine()
    with module._shared.lock:
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(parents,))
        child.start()
    child.join(30)
    assert child.exitcode == 0
    assert shared_engine() is parents


def _in_child(parents):
    own = shared_engine()
    os._exit(0 if own is not parents and shared_engine() is own else 1)


def test_a_replacement_serves_until_its_end():
    usual = shared_engine()
    with shared_engine_replaced(ThreadEngine(1)) as outer:
        assert shared_engine() is outer
        with shared_engine_replaced(ThreadEngine(1)) as inner:
            assert shared_engine() is inner
        assert shared_engine() is outer
    assert shared_engine() is usual
    assert replace_shared_engine(None) is None


class Counting(ThreadEngine):
    """Counts what is submitted to it."""

    submitted = 0

    def submit(self, request):
        self.submitted += 1
        return super().submit(request)


def of_activations(path):
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    settings = {"device_memory": "256KiB", "flash_capacity": "64MiB", "floor": "8KiB"}
    with offload(net, flash=path, policy="all", **settings):
        net(torch.ones(512, 64)).sum().backward()


def of_an_optimizer(path):
    parameter = torch.nn.Parameter(torch.zeros(65536))
    optimizer = FlashAdamW([parameter], flash=path, tile=4096)
    parameter.square().sum().backward()
    optimizer.step()
    optimizer.close()


def of_gradients(path):
    gradient_spill = FlashAdamW(
        [parameter := torch.nn.Parameter(torch.zeros(1 << 20))], flash=path, gradient_memory=0
    )
    parameter.square().sum().backward()
    gradient_spill.close()


def of_a_checkpoint(path):
    checkpoint.save(path / "saved", {"a": torch.arange(4)})


def of_a_data_set(path):
    numpy.save(path / "rows.npy", numpy.zeros((64, 64), numpy.float32))
    dataset = FlashDataset(path / "rows.npy", memory="1MiB", index_dir=path)
    dataset[0]
    dataset.close()


def of_a_suspended_job(path):
    space = SwapSpace(path, capacity_bytes=64 * MIB, recorder=Recorder(event_bytes=0))
    memory = torch.ones(8192)
    address = -(-memory.data_ptr() // 4096) * 4096
    space.tier.write(address, 4096, keep_alive=memory, label="memory").written.wait(10)
    space.close()


@pytest.mark.parametrize(
    "work",
    [
        of_activations,
        of_an_optimizer,
        of_gradients,
        of_a_checkpoint,
        of_a_data_set,
        of_a_suspended_job,
    ],
)
def test_every_product_uses_it(work, disk_path):
    with shared_engine_replaced(Counting(2)) as engine:
        work(disk_path)
        assert engine.submitted > 0
