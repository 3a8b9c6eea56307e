"""Models as ``accelerate.disk_offload`` leaves them: on meta, and with hooks that bring weights."""

import functools
import json

import torch
from torch import nn

from weights_rig import built


def write_as_accelerate(state, folder):
    """A file of the values of each tensor, and ``index.json``, as ``accelerate`` 1.15 writes them."""
    folder.mkdir()
    index = {}
    for name, each in state.items():
        kind = str(each.dtype).removeprefix("torch.")
        index[name] = {"dtype": kind, "shape": list(each.shape)}
        (folder / f"{name}.dat").write_bytes(each.reshape(-1).view(torch.uint8).numpy().tobytes())
    (folder / "index.json").write_text(json.dumps(index))


class Loader:
    """As accelerate's ``OffloadedWeightsLoader``."""

    def __init__(self, folder, index=None):
        self.state_dict = {}
        self.save_folder = str(folder)
        self.index = index or json.loads((folder / "index.json").read_text())


class Prefixed:
    def __init__(self, dataset):
        self.dataset = dataset


class AlignDevicesHook:
    def __init__(self, dataset):
        self.weights_map = dataset and Prefixed(dataset)

    def detach_hook(self, module):
        raise AssertionError("this would bring the weights to memory")


class LayerwiseCastingHook:
    pass


def dispatched(make, folder, *, index=None, hook=None):
    """A model as after ``accelerate.disk_offload``: on meta, with hooks around each forward."""
    model = built(make)
    if index is None:
        write_as_accelerate(model.state_dict(), folder)
    dataset = Loader(folder, index)
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None:
                module._parameters[name] = nn.Parameter(each.to("meta"), each.requires_grad)
        module._old_forward = module.forward
        module._hf_hook = (hook or AlignDevicesHook)(dataset) if hook is None else hook()
        module.forward = functools.partial(forward_of_hooks, module)
    model.hf_device_map = {"": "disk"}
    return model


def forward_of_hooks(module, *args):
    raise AssertionError("the hooks are removed")


def assert_clean(model):
    for module in model.modules():
        assert not {"_hf_hook", "_old_forward", "forward", "hf_device_map"} & module.__dict__.keys()
