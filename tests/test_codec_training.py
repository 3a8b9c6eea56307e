"""Training with codecs: to the last bit with lossless ones, near it with lossy ones, and safe with all.

Sessions here plan for a machine whose flash is so slow that every codec pays, so that all of them are
used; the counters say which were. The first pass is planned raw, the second is sampled, so encoding
begins with the third.
"""

import errno
import gc
import os
import signal
import subprocess
import time
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import preloaded
import test_bitwise
import test_bitwise_random
from offload_runs import (
    SLOW_FLASH,
    GatedTier,
    Trace,
    assert_nothing_held,
    assert_within_budget,
    counted,
    gradients,
    read_bytes,
    same_bits,
    wait_for_writes,
    written_bytes,
)
from penstock.core.errors import NoSpaceError, PenstockError, PenstockWarning, RestoreError
from penstock.core.units import KIB, MIB
from penstock.lab import zoo
from penstock.runtime.encoding import HostCoder
from penstock.store import FaultyTier
from penstock.store.frames import SCRATCH

BUDGET_BYTES = 32 * MIB
SCRATCH_BYTES = BUDGET_BYTES // 8
LOSSLESS = ("zero-value", "narrow", "exponent", "zero-value+exponent")
AUTO = {"machine": SLOW_FLASH, "device_memory": BUDGET_BYTES}


def encoded_bytes(session, codec):
    """Bytes of storages that a codec encoded so far."""
    return counted(session, f"encoded.source_bytes.{codec}")


def assert_only_scratch_held(session):
    """No graph is alive: what is left is what codecs work in, and idle pages."""
    gc.collect()
    wait_for_writes(session)  # of what died meanwhile: a piece in hand is encoded to its end
    assert_nothing_held(session, beside=[SCRATCH])


# -- networks of the zoo ---------------------------------------------------------------------------

FAST_FAMILIES = ("vgg16", "resnet18", "gpt2")
STEPS = 4


def batch_of(family):
    return max(8, test_bitwise.SIZES[family].batch // 4)


@lru_cache(maxsize=2)
def without_penstock(family, *, steps, dtype):
    model, optimizer = test_bitwise.prepare(family)
    return test_bitwise.train(model, optimizer, batch_of(family), steps=steps, dtype=dtype)


def check_family(session_for, family, *, dtype=torch.float32, steps=STEPS, **options):
    """Train under policy ``all``; the session, closed, to ask for its counters."""
    expected = without_penstock(family, steps=steps, dtype=dtype)
    model, optimizer = test_bitwise.prepare(family)
    with session_for(model, optimizer, **AUTO | options) as session:
        found = test_bitwise.train(model, optimizer, batch_of(family), steps=steps, dtype=dtype)
        found.assert_same_bits(expected)
        assert read_bytes(session) > 0
        assert_within_budget(session)
        assert session.budget.used_by(SCRATCH) <= SCRATCH_BYTES
        assert_only_scratch_held(session)
    assert session.budget.used_by(SCRATCH) == 0
    return session


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_a_forced_lossless_codec_changes_no_bit(session_for, patient, family, codec):
    session = check_family(session_for, family, codec=codec, steps=2)
    assert encoded_bytes(session, codec) > MIB


@pytest.mark.parametrize("family", FAST_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_codecs_that_were_measured_change_no_bit(session_for, patient, family, dtype):
    session = check_family(session_for, family, dtype=dtype)
    used = {"vgg16": "positive", "resnet18": "positive", "gpt2": "exponent"}[family]
    assert encoded_bytes(session, used) > 64 * KIB
    assert session.plan.encoded_bytes < 0.95 * session.plan.offloaded_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.families())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("codec", [*LOSSLESS, "auto"])
def test_every_codec_with_every_family(session_for, patient, family, dtype, codec):
    session = check_family(session_for, family, dtype=dtype, codec=codec, steps=5)
    assert any(encoded_bytes(session, name) for name in (*LOSSLESS, "positive"))


# -- what training scripts do ----------------------------------------------------------------------


class Convolutions(nn.Module):
    """Convolution, normalisation, ReLU, pooling; ends in features ``[rows, 64]``."""

    def __init__(self, tied=False):
        super().__init__()
        first, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        if tied:
            second.weight = first.weight
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(second, nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Linear(8, 64)

    def forward(self, images):
        return self.head(self.second(self.first(self.stem(images))).mean((2, 3)))


def images(step, rows=8, width=32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, width, width, generator=generator)


def convolutions():
    recipe = test_bitwise.Recipe(model := Convolutions())
    for step in range(recipe.steps):
        loss = model(images(step)).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def convolutions_accumulated():
    """Forward and backward in turn, then all forwards before the backwards."""
    recipe = test_bitwise.Recipe(model := Convolutions(tied=True))
    for step in range(recipe.steps):
        losses = []
        for micro in range(3):
            losses.append(model(images(3 * step + micro)).pow(2).mean())
            if step % 2:
                losses[-1].backward()
        for each in losses if step % 2 == 0 else ():
            each.backward()
        recipe.step(step, sum(loss.detach() for loss in losses))
        losses.clear()
        each = None
    return recipe.trace


def convolutions_retained():
    recipe = test_bitwise.Recipe(model := Convolutions())
    for step in range(recipe.steps):
        features = model(images(step))
        first, second = features.pow(2).mean(), features.abs().mean()
        first.backward(retain_graph=True)
        second.backward(retain_graph=True)
        first.backward()
        recipe.step(step, first)
        del features, first, second
    return recipe.trace


def convolutions_checkpointed():
    """Both kinds of checkpoint around ReLUs, which run again within backward."""
    recipe = test_bitwise.Recipe(model := Convolutions())
    for step in range(recipe.steps):
        features = model.stem(images(step).requires_grad_())
        features = checkpoint(model.first, features, use_reentrant=False)
        features = checkpoint(model.second, features, use_reentrant=True)
        loss = model.head(features.mean((2, 3))).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
        del features, loss
    return recipe.trace


def convolutions_frozen():
    recipe = test_bitwise.Recipe(
        frozen := Convolutions().requires_grad_(False), top := Convolutions()
    )
    top.stem = frozen.stem
    top.first[0].requires_grad_(False)
    for step in range(recipe.steps):
        loss = (top(images(step)) + frozen(images(step))).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def convolutions_twice_differentiated():
    """ReLU and max-pooling under a gradient penalty."""
    recipe = test_bitwise.Recipe(model := Convolutions())
    for step in range(recipe.steps):
        inputs = images(step, rows=4).requires_grad_()
        score = model(inputs).pow(2).mean()
        (slope,) = torch.autograd.grad(score, inputs, create_graph=True)
        loss = score + (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        recipe.trace.note(f"step {step}, gradient of the input", inputs.grad)
        recipe.step(step, loss)
        del slope, inputs, score, loss
    return recipe.trace


WITH_RELU = (
    convolutions,
    convolutions_accumulated,
    convolutions_retained,
    convolutions_checkpointed,
    convolutions_frozen,
    convolutions_twice_differentiated,
)
DENSE = tuple(test_bitwise.RECIPES)
FAST_DENSE = (test_bitwise.tied_weights, test_bitwise.adversaries, test_bitwise.many_layers)


def named(recipe):
    return recipe.__name__


def check_recipe(session_for, recipe, **options):
    expected = test_bitwise.run(recipe)
    with session_for(**AUTO | options) as session:
        test_bitwise.run(recipe).assert_same_bits(expected)
        assert written_bytes(session) > MIB
        assert_within_budget(session)
        assert_only_scratch_held(session)
    return session


@pytest.mark.parametrize("recipe", WITH_RELU, ids=named)
def test_signs_are_enough_whatever_scripts_do(session_for, patient, recipe):
    session = check_recipe(session_for, recipe)
    assert encoded_bytes(session, "positive") > 256 * KIB


@pytest.mark.parametrize("recipe", FAST_DENSE, ids=named)
def test_what_scripts_do_is_the_same_to_the_last_bit(session_for, patient, recipe):
    session = check_recipe(session_for, recipe)
    assert sum(encoded_bytes(session, codec) for codec in LOSSLESS) > 512 * KIB


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*LOSSLESS, "auto"])
@pytest.mark.parametrize("recipe", [*WITH_RELU, *DENSE], ids=named)
def test_every_codec_with_what_scripts_do(session_for, patient, recipe, codec):
    check_recipe(session_for, recipe, codec=codec)


class Everything(nn.Module):
    """Something for every codec: dense, sparse, two-valued, whole numbers, signs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.next = nn.Conv2d(16, 16, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.wide = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, images):
        x = self.pool(self.relu(self.norm(self.conv(images))))  # signs, and indices
        x = F.relu(self.next(x))  # sparse, and needed by value
        x = self.drop(self.next(x)).double()  # sparse float64
        return self.wide(F.relu(x).movedim(1, -1)).pow(2).mean()


def test_every_codec_is_used_where_it_fits(session_for, patient):
    def train():
        torch.manual_seed(0)
        model, trace = Everything(), Trace()
        for step in range(5):
            loss = model(images(step))
            model.zero_grad()
            loss.backward()
            trace.note_gradients(step, model)
        return trace

    expected = train()
    with session_for(**AUTO) as session:
        train().assert_same_bits(expected)
        used = {name: encoded_bytes(session, name) for name in (*LOSSLESS, "positive")}
        assert min(used.values()) > 0, used
        assert_only_scratch_held(session)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    graph=test_bitwise_random.steps,
    rows=st.sampled_from([33, 256, 1000]),
    passes=st.integers(3, 5),
    options=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["all", "all", "auto"]),
            "floor": st.sampled_from([5 * KIB, 8 * KIB, 200 * KIB]),
            "codec": st.sampled_from([*LOSSLESS, "auto", "auto", "auto"]),
            "device_memory": st.sampled_from([16 * MIB, 64 * MIB]),
        }
    ),
)
def test_random_graphs_with_codecs(session_for, graph, rows, passes, options):
    expected = test_bitwise_random.train(graph, rows, passes)
    with session_for(machine=SLOW_FLASH, **options) as session:
        found = test_bitwise_random.train(graph, rows, passes)
        assert all(map(same_bits, found, expected))
        assert session.budget.peak_bytes <= session.budget.limit_bytes
        assert_only_scratch_held(session)


# -- lossy codecs ----------------------------------------------------------------------------------


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("codec", "most"), [("bfloat16", 2e-2), ("int8", 0.15)])
def test_a_lossy_codec_trains_with_nearly_the_same_gradients(session_for, codec, most):
    torch.manual_seed(0)
    model = Convolutions()
    parameters = list(model.parameters())

    def loss():
        return model(images(0)).pow(2).mean()

    expected = gradients(loss, parameters)
    with session_for(model, codec=codec, **AUTO) as session:
        for _ in range(2):
            made = loss()
            wait_for_writes(session)
            found = gradients(made, parameters)
            del made
        assert encoded_bytes(session, codec) > 100 * KIB
        assert_only_scratch_held(session)
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True) if b.norm() > 1e-6]
    assert 0 < max(errors) < most


def restored(session, tensor):
    """What comes back of a copy of a tensor that nobody holds, after it has been spilled."""
    copy = tensor.clone()
    packed = session.hooks.pack(copy)
    del copy
    wait_for_writes(session)
    return session.hooks.unpack(packed)


def test_a_lossy_codec_leaves_whole_numbers_alone(session_for):
    with session_for(codec="bfloat16", **AUTO) as session:
        numbers = torch.randint(1 << 40, (4096,))
        for exact in (numbers, numbers.int(), numbers % 2 == 0, numbers.double() / 3):
            assert same_bits(restored(session, exact), exact)
        assert encoded_bytes(session, "bfloat16") == 0
        floats = torch.randn(8192)
        assert same_bits(restored(session, floats), floats.bfloat16().float())
        assert_only_scratch_held(session)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "zero-value+bfloat16"])
def test_an_alias_of_another_type_of_what_was_encoded_with_loss_is_exact(session_for, codec):
    with session_for(codec=codec, **AUTO) as session:
        floats = torch.randn(8192)
        aliases = [floats.view(torch.int32), floats.view(torch.uint8), floats.view(torch.float16)]
        expected = [floats.clone(), *(alias.clone() for alias in aliases)]
        packed = [session.hooks.pack(each) for each in (floats, *aliases)]
        del floats, aliases
        wait_for_writes(session)
        found = [session.hooks.unpack(each) for each in packed]
        assert not same_bits(found[0], expected[0])
        assert all(map(same_bits, found[1:3], expected[1:3]))
        assert found[3].dtype == torch.float16  # encoded by a codec that takes it, or as it was
        del packed, found
        assert_only_scratch_held(session)


# -- budgets and faults ----------------------------------------------------------------------------


def chain(depth=8):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(depth)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU(), nn.Hardswish())])


def chain_loss(model, rows=8):
    return model(images(1, rows=rows, width=48)).square().mean()


def chain_gradients(model, session=None):
    loss = chain_loss(model)
    if session is not None:
        wait_for_writes(session)
    return gradients(loss, list(model.parameters()))


def faulty(**options):
    return lambda tier: FaultyTier(tier, **options) if tier.spec.kind == "flash" else tier


def test_a_tight_budget_is_kept_with_codecs(session_for):
    """What is saved is several times the budget, of which a part is scratch memory."""
    model = chain(12)
    parameters = list(model.parameters())
    expected = gradients(chain_loss(model, rows=32), parameters)
    for codec in ("auto", "zero-value+exponent"):
        with session_for(
            model, codec=codec, policy="auto", device_memory=16 * MIB, machine=SLOW_FLASH
        ) as session:
            for _ in range(5):
                found = gradients(chain_loss(model, rows=32), parameters)
                assert all(map(same_bits, found, expected))
            assert session.profile.saved_bytes > 3 * session.budget.limit_bytes
            assert 0 < session.budget.used_by(SCRATCH) <= 2 * MIB
            assert_within_budget(session)
            assert_only_scratch_held(session)
        assert session.budget.used_by(SCRATCH) == 0


@pytest.mark.parametrize("index", [0, 3, 7])
def test_an_encoded_write_that_fails_keeps_the_tensor_and_warns_once(session_for, index):
    model = chain()
    expected = chain_gradients(model)
    wrap = faulty(fail_at={"write": index}, times=2)
    with session_for(model, codec="zero-value", wrap_tier=wrap, **AUTO) as session:
        with pytest.warns(PenstockWarning, match="Input/output error") as caught:
            found = chain_gradients(model, session)
        assert all(map(same_bits, found, expected))
        assert all(map(same_bits, chain_gradients(model, session), expected))
        assert len(caught) == 1
        assert counted(session, "spill.failed.flash") in (1, 2)  # both may be pieces of one storage
        assert_only_scratch_held(session)


def full(index):
    error = NoSpaceError(errno=errno.ENOSPC, op="write", path="/full", offset_bytes=0, nbytes=1)
    return faulty(fail_at={"write": index}, mode="raise", error=error, times=None)


@pytest.mark.parametrize("index", [0, 5])
def test_a_disk_that_fills_up_costs_no_gradient(session_for, index):
    model = chain()
    expected = chain_gradients(model)
    with session_for(model, codec="zero-value", wrap_tier=full(index), **AUTO) as session:
        with pytest.warns(PenstockWarning, match="No space left"):
            found = chain_gradients(model, session)
        assert all(map(same_bits, found, expected))
        assert all(map(same_bits, chain_gradients(model, session), expected))
        assert_only_scratch_held(session)


def test_a_full_disk_falls_back_to_host_memory(session_for):
    """As without a codec: what is refused by one tier goes to the next, and the budget holds."""
    model = chain(12)
    parameters = list(model.parameters())
    expected = gradients(chain_loss(model, rows=32), parameters)
    with session_for(
        model,
        codec="zero-value",
        wrap_tier=full(5),
        host_memory="256MiB",
        device_memory=16 * MIB,
        machine=SLOW_FLASH,
    ) as session:
        with pytest.warns(PenstockWarning, match="No space left") as caught:
            found = gradients(chain_loss(model, rows=32), parameters)
        assert all(map(same_bits, found, expected))
        assert written_bytes(session, "host") > MIB
        assert len(caught) == 1
        assert_within_budget(session)
        assert_only_scratch_held(session)


@pytest.mark.parametrize("codec", ["zero-value", "exponent", "zero-value+exponent"])
@pytest.mark.parametrize("place", [0, 5, 70])
def test_a_damaged_frame_is_an_error_that_names_the_slot(session_for, monkeypatch, codec, place):
    """Damaged before the tier took its checksum: then only the codec can tell, in the header."""
    encode = HostCoder.encode_piece

    def damage(self, job, index, slot):
        length = encode(self, job, index, slot)
        slot.memory[place] ^= 0xFF
        if place >= 64:
            slot.memory[64:length] = 0xFF
        return length

    model = chain(3)
    with session_for(model, codec=codec, **AUTO) as session:
        monkeypatch.setattr(HostCoder, "encode_piece", damage)
        loss = chain_loss(model)
        wait_for_writes(session)
        with pytest.raises(RestoreError, match=r"cannot restore \S+#\d .*does not decode"):
            loss.backward()


def test_a_frame_with_wrong_bytes_on_the_device_is_never_decoded(session_for):
    model = chain(3)
    wrap = faulty(fail_at={"read": 0}, mode="corrupt", times=None)
    with session_for(model, codec="zero-value", wrap_tier=wrap, **AUTO) as session:
        loss = chain_loss(model)
        wait_for_writes(session)
        with pytest.raises(RestoreError, match=r"cannot restore \S+#\d .*checksum"):
            loss.backward()
        assert all(parameter.grad is None for parameter in list(model.parameters())[:-2])


def test_a_session_closes_with_encodes_in_flight(session_for):
    """Some pieces wait at the device, some for a slot, some have not begun."""
    gates = []

    def wrap(tier):
        gates.append(GatedTier(tier, "write"))
        return gates[0]

    model = chain()
    with session_for(model, codec="zero-value", wrap_tier=wrap, **AUTO) as session:
        loss = chain_loss(model)
        assert gates[0].arrived["write"].wait(10)
        gates[0].open("write")
    assert session.budget.used_by(SCRATCH) == 0
    try:
        loss.backward()  # what had not been written is in memory
    except PenstockError as error:
        assert "closed" in str(error)  # noqa: PT017  (either may happen first)


def test_a_graph_that_dies_while_it_is_encoded_leaves_nothing(session_for):
    model = chain()
    expected = chain_gradients(model)
    with session_for(model, codec="zero-value+exponent", **AUTO) as session:
        for _ in range(5):
            loss = chain_loss(model)
            del loss
        assert_only_scratch_held(session)
        assert all(map(same_bits, chain_gradients(model, session), expected))


CTRL_C = """
import sys, torch
from penstock import OffloadConfig, Session
from penstock.plan import Machine
from penstock.store import ThrottledTier
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(20)]
net = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])
config = OffloadConfig(device_memory="16MiB", flash=sys.argv[1], flash_capacity="256MiB",
                       policy="all", floor="64KiB", codec="zero-value")
slow = lambda tier: ThrottledTier(tier, write_bytes_per_s=10**6, read_bytes_per_s=10**6)
with Session(config, model=net, wrap_tier=slow, machine=Machine("slow", 1e6, 1e6, 0, 1e9, 1e9)):
    print("here", flush=True)
    net(torch.randn(16, 3, 64, 64)).square().mean().backward()
"""


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_ends_a_wait_for_an_encoded_write(disk_path):
    child = preloaded.Process(
        ["-c", CTRL_C, disk_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PENSTOCK_SLAB": "16MiB"},
    )
    assert child.stdout.readline() == "here\n"
    time.sleep(1.5)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = child.communicate(timeout=200)
    assert "KeyboardInterrupt" in errors
    assert child.returncode != 0
    assert time.monotonic() - began < 30
    assert os.listdir(disk_path) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.PenstockWarning")
@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("codec", ["zero-value", "exponent", "auto"])
def test_a_fault_at_any_write_or_read_costs_no_gradient(session_for, codec, op):
    """The right gradients, or an error; never wrong ones."""
    model = chain(3)
    expected = chain_gradients(model)
    for index in range(16):
        wrap = faulty(fail_at={op: index}, times=2)
        with session_for(model, codec=codec, wrap_tier=wrap, **AUTO) as session:
            for _ in range(4):
                try:
                    found = chain_gradients(model, session)
                except RestoreError:
                    assert op == "read"
                    torch.ones(1, requires_grad=True).sum().backward()  # forget the failed graph
                else:
                    assert all(map(same_bits, found, expected))
