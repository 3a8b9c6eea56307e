"""Whole sessions whose storages are encoded on a device, whose copies run late (see ``lazy_device``)."""

import threading
from dataclasses import replace

import pytest
import torch
from cuda_training import HOST, MORE_HOST, trained

from cuda_runs import assert_nothing_held
from offload_runs import SLOW_FLASH, gradients, session_in
from penstock.codec.device import FORMS
from penstock.core.errors import BudgetError, ConfigError, RestoreError
from penstock.core.units import MIB
from penstock.observe.recorder import StallCause
from penstock.runtime import stores
from penstock.runtime.cuda import encoding
from penstock.runtime.cuda.encoding import DeviceCoder
from penstock.runtime.eviction import Eviction
from penstock.runtime.transfers import Reads
from penstock.store.frames import SCRATCH, THREAD_NAME

pytestmark = pytest.mark.usefixtures("patient")
BUDGET = "32MiB"
SLOW = replace(SLOW_FLASH, host_write_bytes_per_s=1e5, host_read_bytes_per_s=1e5)
"""To plan for, not to run on: next to it every codec is quick."""


def run(path, *, steps=3, **settings):
    settings = {"host_memory": HOST, "device_memory": BUDGET} | settings
    return trained(steps, session_of=lambda m, o: session_in(path, m, o, **settings))


def encoded_bytes(session, codec=""):
    counter = f"encoded.source_bytes.{codec}" if codec else "encoded.source_bytes"
    return session.recorder.snapshot().counted(counter)


def was_sampled(session):
    return StallCause.SAMPLING in session.recorder.snapshot().stalls


@pytest.mark.parametrize("codec", ["zero-value", "narrow", "exponent"])
@pytest.mark.parametrize("on_flash", [True, False])
def test_a_lossless_codec_changes_no_bit(link, disk_path, codec, on_flash):
    settings = {"codec": codec}
    if not on_flash:
        settings |= {"flash": (), "flash_capacity": None}
    with_us, session = run(disk_path, steps=2, **settings)
    with_us.assert_same_bits(trained(2)[0])
    assert encoded_bytes(session, codec) > 2 * MIB
    assert session.budget.peak_bytes <= 32 * MIB
    assert session.budget.used_bytes == 0


def test_codecs_are_chosen_by_what_they_were_measured_to_do(link, disk_path):
    with_us, session = run(disk_path, steps=6, codec="auto", machine=SLOW, host_memory=MORE_HOST)
    with_us.assert_same_bits(trained(6)[0])
    assert isinstance(session._stores.transport.coder, DeviceCoder)
    chosen = {decision.codec for decision in session.plan.decisions} - {""}
    assert chosen <= set(FORMS)
    assert encoded_bytes(session) > 2 * MIB
    assert was_sampled(session)
    assert session.budget.peak_bytes <= 32 * MIB
    assert {line.codec for line in session.summary().codecs} == chosen


def test_codecs_that_are_slow_on_the_device_are_not_chosen(link, disk_path, monkeypatch):
    """The same step; only what the events tell is another."""
    monkeypatch.setattr(link, "elapsed_ns", lambda start, end: 10**13)
    with_us, session = run(disk_path, steps=4, codec="auto", machine=SLOW, host_memory=MORE_HOST)
    with_us.assert_same_bits(trained(4)[0])
    assert was_sampled(session)
    assert not encoded_bytes(session)
    assert not session.budget.used_by(SCRATCH)


def test_a_lossy_codec_loses_no_more_than_asked_for(link, disk_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    inputs, weights = torch.randn(256, 256), list(model.parameters())

    def loss():
        return model(inputs).square().mean()

    exact = gradients(loss, weights)
    settings = {"host_memory": HOST, "device_memory": BUDGET, "codec": "bfloat16"}
    with session_in(disk_path, model, **settings) as session:
        found = gradients(loss, weights)
        (line,) = session.summary().codecs
        assert line.codec == "bfloat16"
        assert 0.49 < line.ratio < 0.51
        assert_nothing_held(session)
    errors = [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)
    ]
    assert 0 < max(errors) < 2**-5


def test_a_damaged_frame_ends_backward_with_an_error(link, disk_path, monkeypatch):
    make = encoding.encode_tensor

    def damaged(*args):
        frame = make(*args)
        frame[0] ^= 0xFF
        return frame

    monkeypatch.setattr(encoding, "encode_tensor", damaged)
    with pytest.raises(RestoreError, match=r"cannot restore \S+#\d .*does not decode"):
        run(disk_path, codec="zero-value")


@pytest.fixture
def full_once(link, monkeypatch):
    """The device has no memory for the first frame that backward waits for."""
    empty, failures = link.empty_target, []

    def full(nbytes, device):
        if threading.current_thread().name == THREAD_NAME and not failures:
            failures.append(nbytes)
            raise torch.OutOfMemoryError("the device is full")
        return empty(nbytes, device)

    monkeypatch.setattr(link, "empty_target", full)
    monkeypatch.setattr(Reads, "ahead", lambda *_, **__: None)  # who reads ahead can do without


def test_a_device_without_memory_for_a_frame_makes_room(full_once, disk_path, monkeypatch):
    made = []
    monkeypatch.setattr(Eviction, "make", lambda self, nbytes, **_: made.append(nbytes) or True)
    with_us, session = run(disk_path, codec="zero-value")
    with_us.assert_same_bits(trained()[0])
    assert len(made) == 1
    assert session.recorder.snapshot().counted("device.out_of_memory") == 1


def test_a_device_without_memory_for_a_frame_says_so_if_nothing_is_left_to_move(
    full_once, disk_path
):
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        run(disk_path, codec="zero-value")


def test_a_budget_without_room_for_scratch_memory(link, disk_path):
    with pytest.raises(BudgetError, match="codec='none'"):
        run(disk_path, codec="zero-value", device_memory="4MiB")
    with_us, session = run(disk_path, codec="auto", device_memory="4MiB", machine=SLOW)
    with_us.assert_same_bits(trained()[0])
    assert not encoded_bytes(session)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("zero-value+bfloat16", "runs on the CPU only, .* chains have no form for devices"),
        ("zip", "there is no codec 'zip'"),
    ],
)
def test_codecs_that_devices_cannot_have_are_refused(codec, message):
    with pytest.raises(ConfigError, match=message):
        stores.check_device_codec(codec, torch.device("cuda:0"))


@pytest.mark.parametrize("codec", list(FORMS))
def test_codecs_that_devices_can_have(codec):
    stores.check_device_codec(codec, torch.device("cuda:0"))
