"""Whole sessions on a GPU whose storages are encoded there before the copy, and decoded after it."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from gpu_runs import DEVICE, HOST, run, settings_for
from torch import nn

from cuda_runs import assert_nothing_held
from offload_runs import SLOW_FLASH, Trace, counted, session_in
from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.observe.recorder import StallCause
from penstock.runtime.cuda.codec_speeds import CodecSpeeds
from penstock.runtime.cuda.encoding import DeviceCoder
from penstock.store.frames import SCRATCH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*determinis"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]
SLOW = replace(SLOW_FLASH, host_write_bytes_per_s=1e5, host_read_bytes_per_s=1e5)
"""To plan for, not to run on: next to it every codec is quick."""


@pytest.fixture
def little_staging(monkeypatch):
    """Staging memory for less than what is moved, or no codec would gain anything; its bytes."""
    monkeypatch.setattr("penstock.runtime.cuda.accelerator.LEAST_STAGING_BYTES", MIB)
    return 5 * MIB // 2


class Network(nn.Module):
    """Saves zeros, indices, smooth values, and views of one storage; all of it deterministic."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x * torch.tanh(self.second(x))
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = nn.functional.gelu(q * k + v)
        return self.out(x.mean(1))


def trained(path=None, *, steps=2, streams=False, **settings):
    """Losses and gradients of some steps, under a session if there is a path; the session, closed."""
    torch.manual_seed(0)
    model = Network().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = Trace()
    session = path and session_in(path, model, optimizer, **settings).__enter__()
    try:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(48, 3, 16, 16, generator=generator).to(DEVICE)
            y = (torch.arange(48) % 10).to(DEVICE)
            side = torch.cuda.Stream() if streams else torch.cuda.current_stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            torch.cuda.current_stream().wait_stream(side)
            trace.note(f"step {step}, loss", loss)
            trace.note_gradients(step, model)
            optimizer.step()
            optimizer.zero_grad()
        del x, y, loss
        if session:
            assert_nothing_held(session)
    finally:
        if session:
            session.close()
    return trace, session


@lru_cache
def plain(**how):
    """The trace without a session."""
    return trained(**how)[0]


def encoded_bytes(session, codec=""):
    return counted(session, f"encoded.source_bytes.{codec}" if codec else "encoded.source_bytes")


@pytest.mark.parametrize("codec", ["zero-value", "narrow", "exponent"])
@pytest.mark.parametrize("places", ["flash", "host"])
def test_a_lossless_codec_changes_no_bit(disk_path, small_knobs, patient, codec, places):
    settings = settings_for(places, codec=codec)
    found, session = trained(disk_path, **settings)
    found.assert_same_bits(plain())
    assert encoded_bytes(session, codec) > 2 * MIB
    assert not counted(session, "encoded.no_device_form")
    assert session.budget.used_by(SCRATCH) == 0


def test_it_need_not_wait_for_writes(disk_path, small_knobs):
    """What backward asks for while it is encoded is still there, or comes back."""
    found, session = trained(disk_path, codec="zero-value", host_memory=HOST)
    found.assert_same_bits(plain())
    assert isinstance(session._stores.transport.coder, DeviceCoder)


def test_under_a_budget_it_changes_no_bit(disk_path, small_knobs):
    settings = {"codec": "exponent", "policy": "auto", "device_memory": "16MiB", "floor": "16KiB"}
    found, session = trained(disk_path, host_memory=HOST, **settings)
    found.assert_same_bits(plain())
    assert session.budget.peak_bytes <= 16 * MIB


def test_codecs_are_chosen_by_what_they_were_measured_to_do(
    disk_path, small_knobs, patient, little_staging
):
    settings = {"codec": "auto", "machine": SLOW, "device_memory": "64MiB"}
    settings["host_memory"] = little_staging
    found, session = trained(disk_path, steps=5, **settings)
    found.assert_same_bits(plain(steps=5))
    assert StallCause.SAMPLING in session.recorder.snapshot().stalls
    chosen = {decision.codec for decision in session.plan.decisions} - {""}
    assert chosen
    assert encoded_bytes(session) > 2 * MIB
    assert {line.codec for line in session.summary().codecs} == chosen


def test_no_codec_is_sampled_where_staging_memory_holds_all_that_is_moved(
    disk_path, small_knobs, patient
):
    settings = {"codec": "auto", "machine": SLOW, "device_memory": "64MiB", "host_memory": HOST}
    found, session = trained(disk_path, steps=5, **settings)
    found.assert_same_bits(plain(steps=5))
    assert session.plan.offloaded_bytes > 2 * MIB
    assert StallCause.SAMPLING not in session.recorder.snapshot().stalls
    assert not encoded_bytes(session)


def test_codecs_that_prove_slow_beside_the_network_are_chosen_no_more(
    disk_path, small_knobs, patient, little_staging, monkeypatch
):
    limit = CodecSpeeds.limit

    def slow(self, *args, **how):
        achieved = limit(self, *args, **how)
        return achieved if achieved == args[-1] else 1.0  # bytes a second

    monkeypatch.setattr(CodecSpeeds, "limit", slow)
    settings = {"codec": "auto", "machine": SLOW, "device_memory": "64MiB"}
    settings["host_memory"] = little_staging
    found, session = trained(disk_path, steps=20, **settings)
    found.assert_same_bits(plain(steps=20))
    assert encoded_bytes(session) > 2 * MIB
    assert session.plan.offloaded_bytes > 0
    assert {decision.codec for decision in session.plan.decisions} == {""}
    assert counted(session, "plan.sampled") >= 2


def test_on_other_streams(disk_path, small_knobs, patient):
    found, session = trained(disk_path, codec="zero-value", streams=True, host_memory=HOST)
    found.assert_same_bits(plain(streams=True))
    assert encoded_bytes(session) > 2 * MIB


@pytest.mark.parametrize("family", ["resnet18", "gpt2"])
def test_networks_of_the_zoo(disk_path, small_knobs, patient, family):
    expected = run(family, steps=2)[0]
    settings = settings_for("flash", codec="zero-value")
    found, session = run(family, disk_path, session_settings=settings, steps=2)
    found.assert_same_bits(expected)
    assert encoded_bytes(session) > MIB


def test_a_lossy_codec_halves_what_is_moved(disk_path, small_knobs, patient):
    _, session = trained(disk_path, steps=1, codec="bfloat16", host_memory=HOST)
    (line,) = session.summary().codecs
    assert line.codec == "bfloat16"
    assert 0.49 < line.ratio < 0.52


def test_what_has_no_form_for_devices_is_refused(disk_path):
    with pytest.raises(ConfigError, match="runs on the CPU only"):
        trained(disk_path, codec="zero-value+bfloat16", host_memory=HOST)
