"""Models and optimizers in wrappers: torch.compile's, DDP's, accelerate's, Lightning's."""

import pytest
import torch
from checkpoint_runs import assert_same, small_store

from penstock import MismatchError
from penstock.checkpoint import Checkpointer, training_state
from penstock.io.threads import ThreadEngine
from penstock.optim import FlashAdamW
from penstock.testing.faults import GatedSyscalls

STORE = small_store()
STEPS = 3


class Accelerated(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class, that was never made one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Lightnings:
    """As Lightning's: of the class of what it wraps, and asks that for what it has not."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type("Lightnings", (Lightnings, type(optimizer)), {})

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def parts(wrap):
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    return training_state(model=model, optimizer=wrap(torch.optim.AdamW(model.parameters())))


def train(state, steps=STEPS):
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(5, 40)).square().mean().backward()
        state["optimizer"].step()


@pytest.mark.parametrize("wrap", [Accelerated, Lightnings])
def test_a_wrapped_optimizer_resumes_exactly(disk_path, wrap):
    state = parts(wrap)
    train(state)
    STORE.save(disk_path / "a", state)
    train(state)
    resumed = parts(wrap)
    loaded = STORE.load(disk_path / "a", resumed)
    assert loaded["optimizer"] is resumed["optimizer"]
    train(resumed)
    assert_same(resumed["model"].state_dict(), state["model"].state_dict())


@pytest.mark.parametrize("wrap", [Accelerated, Lightnings])
def test_a_save_in_the_background_hears_of_the_step_of_a_wrapped_optimizer(disk_path, wrap):
    gate = GatedSyscalls()
    store = small_store(make_engine=lambda: ThreadEngine(1, syscalls=gate))
    weight = torch.nn.Parameter(torch.ones(600_000))  # more than all buffers hold
    optimizer = wrap(torch.optim.SGD([weight], lr=0.5))
    weight.grad = torch.ones_like(weight)
    with Checkpointer(disk_path, store=store) as checkpoints:
        saving = checkpoints.save(1, {"weight": weight, "optimizer": optimizer}, wait=False)
        gate.wait_for_call()
        assert saving.copied_bytes == 0
        optimizer.step()
        assert saving.copied_bytes > 0
        gate.open()
        assert torch.equal(checkpoints.load()["weight"], torch.ones(600_000))


def test_a_wrapped_optimizer_on_flash_goes_there_again(disk_path):
    (disk_path / "spill").mkdir()

    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = FlashAdamW(model.parameters(), flash=disk_path / "spill")
        return training_state(model=model, optimizer=Accelerated(optimizer))

    state = made()
    train(state)
    STORE.save(disk_path / "a", state)
    train(state)
    resumed = STORE.load(disk_path / "a", made())
    train(resumed)
    assert_same(resumed["model"].state_dict(), state["model"].state_dict())


class Alone(torch.optim.Optimizer):
    """Never made an optimizer, and no wrapper of one."""

    def __init__(self, weight):
        self.state, self.param_groups = {}, [{"params": [weight]}]

    def state_dict(self):
        return {"rate": 0.5, "param_groups": [{"params": [0]}]}

    def load_state_dict(self, state_dict):
        self.rate = state_dict["rate"]

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)


def test_without_an_optimizer_whose_steps_are_heard_of_the_save_takes_all_at_once(disk_path):
    weight = torch.nn.Parameter(torch.ones(9000))
    optimizer = Alone(weight)
    state = {"weight": weight, "optimizer": optimizer}
    with Checkpointer(disk_path, store=STORE) as checkpoints:
        checkpoints.save(1, state, wait=False)
        optimizer.step()
        checkpoints.wait()
        checkpoints.load(state)
    assert torch.equal(weight, torch.ones(9000))
    assert optimizer.rate == 0.5


def linear():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def test_a_compiled_model_resumes_exactly_and_says_what_its_keys_are(disk_path):
    def made():
        torch.manual_seed(0)
        model = torch.compile(torch.nn.Linear(40, 30), backend="eager")
        return training_state(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state = made()
    train(state)
    STORE.save(disk_path / "a", state)
    train(state)
    resumed = made()
    STORE.load(disk_path / "a", resumed)
    train(resumed)
    assert_same(resumed["model"].state_dict(), state["model"].state_dict())
    plain = {"model": torch.nn.Linear(40, 30)}
    expected = (
        r"model has keys with '_orig_mod\.' in the checkpoint, where torch\.compile puts it, and"
    )
    with pytest.raises(MismatchError, match=expected + " not here: give the module that is in it"):
        STORE.load(disk_path / "a", plain, partial=True)
    STORE.load(disk_path / "a", {"model": resumed["model"]}, partial=True)


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        (Wrapper, r"has keys with 'module\.' here, where DistributedDataParallel puts it"),
        (
            lambda it: torch.nn.Sequential(torch.compile(it[0], backend="eager"), it[1]),
            r"with '_orig_mod\.' here",
        ),
        (lambda it: it[:1], r"model\.1\.weight is in the checkpoint, and not here"),
    ],
)
def test_a_wrapper_that_was_not_there_is_named(disk_path, wrap, what):
    STORE.save(disk_path / "a", {"model": linear()})
    with pytest.raises(MismatchError, match=what):
        STORE.load(disk_path / "a", {"model": wrap(linear())})
