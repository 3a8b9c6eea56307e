"""Models that are built by their constructors with their weights in files."""

import copy
import errno
import gc
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import penstock
from penstock import weights
from penstock.homed import home_of
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.testing.shared_engine import shared_engine_replaced
from penstock.weights import build, homes, pieces
from penstock.weights.resting import RestingParameter

FLOOR = 4096


class Gpt(nn.Module):
    """A small GPT with tied weights, whose initialisers run when all of it is there."""

    def __init__(self, width=64, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sized(nn.Module):
    """Parameters that are made with values."""

    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(65, 67))
        self.empty = nn.Parameter(torch.zeros(64, 64))
        self.late = nn.Parameter(torch.empty(64, 64))
        self.short = nn.Parameter(torch.randn(64, 128).to(torch.bfloat16))
        self.numbers = nn.Parameter(torch.arange(4096), requires_grad=False)
        with torch.no_grad():
            self.late[3:].uniform_()
            self.late[:3] = 7


MODELS = {
    "linear": lambda: nn.Linear(128, 96),
    "attention": lambda: nn.MultiheadAttention(64, 4),
    "conv": lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.ConvTranspose2d(32, 16, 3)),
    "channels last": lambda: nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last),
    "embedding": lambda: nn.Embedding(200, 32, padding_idx=3),
    "recurrent": lambda: nn.LSTM(32, 64, 2),
    "gpt": Gpt,
    "clones": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128), 3, enable_nested_tensor=False
    ),
    "weight norm": lambda: weight_norm(nn.Linear(64, 64)),
    "values": Sized,
    "lists": lambda: nn.ParameterList(torch.randn(40, 40) for _ in range(4)),
    "two classes of size": lambda: nn.Sequential(*(nn.Linear(n, n) for n in (8, 70, 9, 90))),
}


@pytest.fixture(params=["roomy", "narrow"])
def narrow(request, monkeypatch):
    """Twice: with as many young weights as there are by default, and with hardly any."""
    if request.param == "narrow":
        monkeypatch.setattr(build, "YOUNG_BYTES", 20_000)
        monkeypatch.setattr(homes, "SLAB_BYTES", 40_960)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_built_on_flash_has_the_bits_of_the_plain_one(name, disk_path, narrow):
    torch.manual_seed(3)
    plain = MODELS[name]()
    after = torch.rand(4)
    torch.manual_seed(3)
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        built = MODELS[name]()
    assert torch.equal(torch.rand(4), after)
    both = list(zip(plain.named_parameters(), built.named_parameters(), strict=True))
    for (key, expected), (key_too, found) in both:
        assert key == key_too
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found, expected), key
        assert (type(found) is RestingParameter) == (expected.nbytes >= FLOOR), key
    for expected, found in zip(plain.buffers(), built.buffers(), strict=True):
        assert torch.equal(found, expected)
    for home in filter(None, map(home_of, built.parameters())):  # what the files have, checked
        memory = torch.empty(home.ticket.window.nbytes + 4096, dtype=torch.uint8)
        address = -(-memory.data_ptr() // 4096) * 4096
        home.tier.read(home.ticket, address, keep_alive=memory).wait()


@contextmanager
def most_resident_bytes():
    """A function that returns by how much the process's memory has grown at most, mapped files too."""

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    yield lambda: status("VmHWM") - before


def check_equal(model, expected):
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 300, (2, 16), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("in_session", [False, True])
def test_a_built_model_trains_to_the_bits_of_the_plain_one(disk_path, narrow, in_session):
    torch.manual_seed(3)
    plain = Gpt()
    torch.manual_seed(3)
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        built = Gpt()
    expected = train(plain)
    if in_session:
        before = {home_of(each) for each in built.parameters()}
        with penstock.offload(
            built,
            weights="flash",
            weights_memory="256KiB",
            floor=FLOOR,
            flash=disk_path,
            device_memory="64MiB",
        ):
            assert {home_of(each) for each in built.parameters()} == before, "homes are kept"
            assert home_of(built.embed.weight).name == "embed.weight"
            assert train(built) == expected
    else:
        assert train(built) == expected
    check_equal(built, plain)


def test_a_built_model_can_be_copied_saved_and_loaded(disk_path):
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = Gpt()
        inside = copy.deepcopy(model)
        assert home_of(inside.embed.weight) is None
    assert type(inside.embed.weight) is RestingParameter
    outside = copy.deepcopy(model)
    assert type(outside.embed.weight) is nn.Parameter
    assert outside.head.weight is outside.embed.weight
    torch.save(model.state_dict(), disk_path / "state")
    other = Gpt()
    other.load_state_dict(torch.load(disk_path / "state"))
    for each in (inside, outside, other):
        check_equal(each, model)


def test_tied_weights_have_one_home(disk_path):
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = Gpt()
    assert model.head.weight is model.embed.weight
    assert home_of(model.head.weight) is not None


def test_memory_of_which_somebody_has_a_view_is_not_taken_away(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 0)
    held = []

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            values = torch.zeros(64, 64)
            self.first = nn.Parameter(values)
            self.second = nn.Parameter(torch.ones(64, 64))
            self.third = nn.Parameter(torch.ones(64, 64))
            values.fill_(3)  # the parameter shares it
            self.fourth = nn.Parameter(torch.ones(64, 64))
            held.append(self.fourth.data)

    with (
        pytest.warns(penstock.PenstockWarning, match=r"16.00 KiB of weights stay.*Viewed\.fourth$"),
        penstock.built_on_flash(disk_path, floor=FLOOR),
    ):
        model = Viewed()
    assert type(model.first) is RestingParameter
    assert torch.equal(model.first, torch.full((64, 64), 3.0))
    assert type(model.fourth) is nn.Parameter
    held[0].fill_(5)
    assert torch.equal(model.fourth, torch.full((64, 64), 5.0))


def test_a_part_of_other_memory_stays_there_and_is_named(disk_path):
    flat = torch.randn(2 * 4096)
    with (
        pytest.warns(penstock.PenstockWarning, match="ParameterDict.part"),
        penstock.built_on_flash(disk_path, floor=FLOOR),
    ):
        model = nn.ParameterDict({"part": nn.Parameter(flat[:4096])})
    assert model["part"].data_ptr() == flat.data_ptr()


def test_memory_that_was_not_touched_is_not_written(disk_path):
    with (
        CountingEngine().shared() as engine,
        penstock.built_on_flash(disk_path, floor=FLOOR),
    ):
        # so large that no free memory of the heap has room for it
        model = nn.utils.skip_init(nn.Linear, 8192, 8192, bias=False)
        other = nn.Parameter(torch.ones(512, 512))
        model.register_parameter("other", other)
        del other
    assert home_of(model.weight) is not None  # torch makes it without a call of its hook
    assert engine.written_bytes == 4 * 512 * 512
    assert not model.weight.any()


def test_values_of_a_file_are_copied_though_no_page_of_it_is_in_memory(disk_path):
    path = disk_path / "values"
    path.write_bytes(bytes(range(1, 129)) * (1 << 15))
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        made = torch.from_file(str(path), shared=True, size=1 << 22, dtype=torch.uint8)
        model = nn.ParameterDict({"given": nn.Parameter(made, requires_grad=False)})
        del made
    assert type(model["given"]) is RestingParameter
    assert model["given"].min() == 1


def fail_in_block(path, make):
    """Make modules in a block that fails after them."""
    with penstock.built_on_flash(path, floor=FLOOR):
        made = make()
        raise KeyError(made)


def test_one_block_at_a_time_and_none_after_an_error(disk_path):
    with (
        pytest.raises(penstock.ConfigError, match="inside another"),
        penstock.built_on_flash(disk_path, floor=FLOOR),
        penstock.built_on_flash(disk_path),
    ):
        pass
    with pytest.raises(KeyError) as caught:
        fail_in_block(disk_path, lambda: nn.Linear(64, 64))
    assert type(caught.value.args[0].weight) is nn.Parameter
    assert home_of(nn.Linear(64, 64).weight) is None
    assert nn.Parameter.__deepcopy__.__qualname__ == "Parameter.__deepcopy__"
    with (
        pytest.raises(penstock.ConfigError, match="does not exist"),
        penstock.built_on_flash(disk_path / "missing"),
    ):
        pass


def test_what_another_thread_makes_stays_in_memory(disk_path):
    made = []
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        worker = threading.Thread(target=lambda: made.append(nn.Linear(64, 64)))
        worker.start()
        worker.join()
    assert type(made[0].weight) is nn.Parameter


def test_a_weight_that_was_touched_when_the_block_failed_is_whole_and_in_memory(
    disk_path, monkeypatch
):
    monkeypatch.setattr(build, "YOUNG_BYTES", 0)

    def make():
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        assert type(first.weight) is RestingParameter
        nn.init.ones_(first.weight)
        return first, second

    with pytest.raises(KeyError) as caught:
        fail_in_block(disk_path, make)
    first, _ = caught.value.args[0]
    assert home_of(first.weight) is None
    assert torch.equal(first.weight, torch.ones(64, 64))


def test_another_type_and_shape_can_be_assigned_to_a_young_weight(disk_path):
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = nn.Linear(64, 64)
        expected = model.weight.to(torch.bfloat16)
        model.to(torch.bfloat16)
        del expected.grad
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, expected)


def test_operations_on_many_weights_at_once_are_exact(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 20_000)
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
    torch.manual_seed(1)
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        built = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
        for model in (plain, built):
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 3.0)
                for each in model.parameters():
                    each.add_(model[0].weight[0, 0].item())
                norm = torch.stack(torch._foreach_norm(list(model.parameters()))).norm()
                torch._foreach_div_(list(model.parameters()), norm)
    check_equal(built, plain)


def test_files_are_no_longer_than_the_weights_and_end_with_them(disk_path, monkeypatch):
    monkeypatch.setattr(homes, "SLAB_BYTES", 1 << 26)
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    sizes = {
        file.fd: file.size_bytes for layer in model for file in home_of(layer.weight).place.files
    }
    assert sum(sizes.values()) == 3 << 22
    assert os.listdir(disk_path) == []
    del model
    gc.collect()
    for fd in sizes:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_several_directories_share_each_weight(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 0)
    paths = [disk_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    torch.manual_seed(1)
    plain = MODELS["two classes of size"]()
    torch.manual_seed(1)
    with penstock.built_on_flash(paths, floor=FLOOR):
        built = MODELS["two classes of size"]()
        for each in built.parameters():
            each.data.mul_(2)
    assert torch.equal(built[3].weight, 2 * plain[3].weight)
    assert len({file.path for file in home_of(built[3].weight).place.files}) == 3


class CountingEngine(ThreadEngine):
    """Counts what is written, and fails a write if told so."""

    def __init__(self):
        super().__init__(threads=2)
        self.written_bytes = 0
        self.fail_after = 1 << 60

    def submit(self, request):
        if request.op == "write":
            if self.written_bytes >= self.fail_after:
                raise penstock.TransferError(
                    errno=errno.EIO, op="write", path="x", offset_bytes=0, nbytes=1
                )
            self.written_bytes += request.nbytes
        return super().submit(request)

    def shared(self):
        return shared_engine_replaced(self)


def test_a_failed_write_ends_the_construction(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 20_000)
    engine = CountingEngine()
    engine.fail_after = 50_000
    made = []
    with (
        engine.shared(),
        pytest.raises(penstock.TransferError, match="write"),
        penstock.built_on_flash(disk_path, floor=FLOOR),
    ):
        made.extend(nn.Linear(64, 64) for _ in range(9))
    assert len(made) < 9


class SlowWrites(Syscalls):
    def write(self, *about):
        time.sleep(0.05)
        return super().write(*about)


def test_what_had_gone_home_when_the_block_failed_is_whole(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 0)
    made = []

    def fail(make):
        with penstock.built_on_flash(disk_path, floor=FLOOR):
            made.extend(make())
            raise KeyError

    def make():
        torch.manual_seed(1)
        return [nn.Linear(512, 512) for _ in range(4)]

    engine = ThreadEngine(threads=1, syscalls=SlowWrites())
    with shared_engine_replaced(engine), pytest.raises(KeyError):
        fail(make)
    for mine, other in zip(made, make(), strict=True):
        assert torch.equal(mine.weight, other.weight)


def test_a_failed_read_in_the_block_names_the_weight(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 0)
    with CountingEngine().shared(), penstock.built_on_flash(disk_path, floor=FLOOR):
        first, second, _ = (nn.Linear(64, 64) for _ in range(3))
        second.weight.sum()  # what is being written is waited for
        [file] = home_of(first.weight).place.files
        length = os.fstat(file.fd).st_size
        os.ftruncate(file.fd, 4096)
        with pytest.raises(
            penstock.TransferError, match=r"weight Linear\.weight cannot be read from"
        ):
            first.weight.sum()
        os.ftruncate(file.fd, length)


def test_no_room_is_an_error_where_the_next_parameter_is_made(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 0)
    monkeypatch.setattr(homes, "SLAB_BYTES", 1 << 40)
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: 100_000)

    def open_files():
        places = [
            os.readlink(each.path) for each in os.scandir("/proc/self/fd") if each.is_symlink()
        ]
        return [each for each in places if each.startswith(str(disk_path))]

    made = []
    with (
        pytest.raises(penstock.NoSpaceError) as caught,
        penstock.built_on_flash(disk_path, floor=FLOOR),
    ):
        made.extend(nn.Linear(width, width) for width in (64, 256, 64))
    text = str(caught.value)
    for part in (
        "256.00 KiB are needed there, 97.66 KiB are free",
        "no room for the next weight, Linear.weight of 256.00 KiB, beside 16.00 KiB that are built",
        "`penstock plan --weights flash` says before",
    ):
        assert part in text, text
    assert len(made) == 2
    assert type(made[0].weight) is RestingParameter
    assert torch.equal(made[0].weight, made[0].weight.clone())
    assert open_files()
    del caught
    made.clear()
    gc.collect()
    assert not open_files()
    assert os.listdir(disk_path) == []


class Late(nn.Module):
    """64 weights of 4 MiB, whose initialisers run twice: in their modules, and at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(64))
        for layer in self.layers:
            nn.init.ones_(layer.weight)


def test_only_young_weights_and_pieces_are_in_memory(disk_path, monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 16 << 20)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 << 20)
    with penstock.built_on_flash(disk_path):
        warm = nn.Linear(1024, 1024)  # what torch and Penstock load at their first use
    with most_resident_bytes() as most, penstock.built_on_flash(disk_path):
        model = Late()
    # young ones, twice as many where they are only read, and what the writer and a reader have
    assert 0 < most() < 80 << 20
    with most_resident_bytes() as most:
        weights.save(model, disk_path / "saved", shard="64MiB")
        weights.load(model, disk_path / "saved")
    assert 0 < most() < 48 << 20
    assert warm is not None
    assert torch.equal(model.layers[-1].weight, torch.ones(1024, 1024))
