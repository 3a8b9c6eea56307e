"""Models as ``accelerate`` offloads them: on meta, and with hooks that bring weights."""

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

    def __init__(self, folder, index=None, state_dict=None):
        self.state_dict = state_dict or {}
        self.save_folder = str(folder)
        self.index = index or json.loads((folder / "index.json").read_text())


class Prefixed:
    """As accelerate's ``PrefixedDataset``."""

    def __init__(self, dataset, prefix):
        self.dataset, self.prefix = dataset, prefix


class AlignDevicesHook:
    def __init__(self, dataset, prefix=""):
        self.weights_map = dataset and Prefixed(dataset, prefix)

    def detach_hook(self, module):
        raise AssertionError("this would bring the weights to memory")


class LayerwiseCastingHook:
    pass


def dispatched(make, folder, *, index=None, hook=None, in_memory=(), on_device=()):
    """A model as accelerate dispatches it: on meta, with hooks around each forward.

    Args:
        make: Makes the model.
        folder: Where its weights are.
        index: What is in which safetensors; None: all that is on disk is written to the folder.
        hook: Class of the hooks, if they bring no weights.
        in_memory: Beginnings of names of weights that are in host memory, and not on disk.
        on_device: Those of weights that are on a device.
    """
    model = built(make)
    state = {
        name: each for name, each in model.state_dict().items() if not name.startswith(on_device)
    }
    there = {name: state.pop(name) for name in tuple(state) if name.startswith(in_memory)}
    if index is None:
        write_as_accelerate(state, folder)
    dataset = Loader(folder, index, there)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, each in module._parameters.items():
            if each is not None:
                device = "cuda" if f"{prefix}{name}".startswith(on_device) else "meta"
                module._parameters[name] = nn.Parameter(each.to(device), each.requires_grad)
        module._old_forward = module.forward
        module._hf_hook = AlignDevicesHook(dataset, prefix) if hook is None else hook()
        module.forward = functools.partial(forward_of_hooks, module)
    model.hf_device_map = {"": "disk"}
    return model


def forward_of_hooks(module, *args):
    raise AssertionError("the hooks are removed")


def assert_clean(model):
    for module in model.modules():
        assert not {"_hf_hook", "_old_forward", "forward", "hf_device_map"} & module.__dict__.keys()
