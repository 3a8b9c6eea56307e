"""A resumed run is the one that never stopped, with whatever torch trains by."""

import warnings

import pytest
import torch
from checkpoint_runs import small_store

from grids import parametrize
from penstock import CheckpointError
from penstock.checkpoint import Checkpointer

STORE = small_store()
STEPS = 6
_S = torch.optim.lr_scheduler

SCHEDULERS = {
    "lambda": lambda o: _S.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: _S.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: _S.StepLR(o, 2),
    "multistep": lambda o: _S.MultiStepLR(o, [2, STEPS, STEPS, STEPS + 2]),
    "constant": _S.ConstantLR,
    "linear": _S.LinearLR,
    "exponential": lambda o: _S.ExponentialLR(o, 0.9),
    "polynomial": lambda o: _S.PolynomialLR(o, 10),
    "cosine": lambda o: _S.CosineAnnealingLR(o, 10),
    "restarts": lambda o: _S.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: _S.ChainedScheduler([_S.ConstantLR(o), _S.ExponentialLR(o, 0.9)]),
    "sequential": lambda o: _S.SequentialLR(o, [_S.ConstantLR(o), _S.StepLR(o, 2)], [4]),
    "plateau": lambda o: _S.ReduceLROnPlateau(o, patience=2),
    "cyclic": lambda o: _S.CyclicLR(o, 0.01, 0.1, 3),
    "one cycle": lambda o: _S.OneCycleLR(o, 0.1, 2 * STEPS),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # SequentialLR's
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_as_if_nothing_had_happened(disk_path, name):
    def parts():
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        return {
            "weight": weight,
            "optimizer": optimizer,
            "scheduler": SCHEDULERS[name](optimizer),
        }

    def train(state):
        rates = []
        for _ in range(STEPS):
            state["optimizer"].zero_grad()
            state["weight"].square().sum().backward()
            state["optimizer"].step()
            state["scheduler"].step(*[1.0][: name == "plateau"])
            rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    plain = parts()
    if any(callable(each) for each in plain["scheduler"].state_dict().values()):
        pytest.skip("this torch has code in its state, which is refused")
    train(plain)
    STORE.save(disk_path / "a", plain)
    resumed = STORE.load(disk_path / "a", parts())
    assert train(resumed) == train(plain)
    assert torch.equal(resumed["weight"], plain["weight"])
    if name == "multistep":  # with a number, it asks a Counter for its elements
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resumed["scheduler"].step(STEPS)


def _params(model):
    return [each for each in model.parameters() if each.ndim == 2]


OPTIMIZERS = [
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
]
IN_FLOAT32_ONLY = ("LBFGS", "SparseAdam")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # LBFGS's
@parametrize(
    {"name": OPTIMIZERS, "dtype": (torch.float32, torch.bfloat16), "stepped": (False, True)},
    possible=lambda name, dtype, stepped: dtype is torch.float32 or name not in IN_FLOAT32_ONLY,
)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(disk_path, name, dtype, stepped):
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip("this torch has none")

    def parts():
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 5).to(dtype)
        if name == "SparseAdam":
            model = torch.nn.Embedding(9, 4, sparse=True)
        return {"model": model, "optimizer": kind(_params(model))}

    def train(state):
        torch.manual_seed(1)
        model, optimizer = state["model"], state["optimizer"]
        features = torch.randn(7, 6).to(dtype)
        if name == "SparseAdam":
            features = torch.randint(0, 9, (7,))

        def closure():
            optimizer.zero_grad()
            loss = model(features).float().square().mean()
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)

    def tensors(state):
        found = dict(state["model"].named_parameters())
        for number, each in enumerate(state["optimizer"].state.values()):
            found |= {f"{number}.{k}": v for k, v in each.items() if isinstance(v, torch.Tensor)}
        return found

    plain, resumed = parts(), parts()
    train(plain)
    STORE.save(disk_path / "a", plain)
    if stepped:
        train(resumed)
    STORE.load(disk_path / "a", resumed)
    for _ in range(2):
        ours, theirs = tensors(resumed), tensors(plain)
        assert ours.keys() == theirs.keys()
        for key, each in ours.items():
            assert each.dtype == theirs[key].dtype, key
            assert torch.equal(each, theirs[key]), key
        train(plain)
        train(resumed)


class Stubborn(torch.nn.Module):
    """Takes no state."""

    def state_dict(self, **_):
        return {"a": 1}

    def load_state_dict(self, state, **_):
        raise KeyError("step")


def test_an_object_that_does_not_take_its_state_is_named(disk_path):
    STORE.save(disk_path / "a", {"deep": {"it": Stubborn()}})
    with pytest.raises(CheckpointError, match=r"^deep\.it: .* Stubborn .*KeyError: 'step'"):
        STORE.load(disk_path / "a", {"deep": {"it": Stubborn()}})


def test_facts_that_are_no_json_are_refused_before_anything_is_written(disk_path):
    for fact in (torch.ones(1), float("nan"), {1, 2}):
        with pytest.raises(CheckpointError, match="facts are a dictionary of JSON"):
            STORE.save(disk_path / "a", {"x": 1}, facts={"loss": fact})
    assert not list(disk_path.iterdir())


def test_an_average_that_was_made_in_inference_mode_is_saved_and_loaded(disk_path):
    with torch.inference_mode():
        average = {"plain": torch.arange(12.0), "turned": torch.arange(12.0).reshape(3, 4).t()}
        average["part"] = average["plain"][2:5]
        with Checkpointer(disk_path, store=STORE) as checkpoints:
            checkpoints.save(1, average, wait=False)
        empty = {name: torch.zeros_like(each) for name, each in average.items()}
    with Checkpointer(disk_path, store=STORE) as checkpoints:
        checkpoints.save(2, average, wait=False)
        checkpoints.load(empty)
    for name, each in average.items():
        assert torch.equal(each, empty[name])


def test_what_is_loaded_during_an_evaluation_can_be_trained_on(disk_path):
    def parts():
        weight = torch.nn.Parameter(torch.ones(3))
        return {"weight": weight, "optimizer": torch.optim.AdamW([weight])}

    def train(state):
        state["optimizer"].zero_grad()
        state["weight"].square().sum().backward()
        state["optimizer"].step()

    plain, resumed = parts(), parts()
    train(plain)
    STORE.save(disk_path / "a", plain)
    with torch.inference_mode():
        STORE.load(disk_path / "a", resumed)
        alone = STORE.load(disk_path / "a")
    train(resumed)
    train(plain)
    assert torch.equal(plain["weight"], resumed["weight"].data)
    alone["weight"].requires_grad_()
