"""The ways to save of ``integrity.py``, and the state that is saved.

An interpreter that has a peer need not have Penstock: classes are found when they are wanted.
"""

from importlib import import_module
from typing import NamedTuple

import torch

WEIGHTS, NORMS, WIDTH = 8, 4, 768
EXPONENT, SMALL = 0x7C000000, 0x3C000000


def build(seed, nbytes, frozen=0):
    """Tensors of many sizes, none of which is a power of two."""
    rows = nbytes // WEIGHTS // 4 // WIDTH
    made = {}
    for index in range(WEIGHTS):
        spread = (index - (WEIGHTS - 1) / 2) / 2 / WEIGHTS
        shape = (int(rows * (1 + spread)), WIDTH)
        made[f"layer.{index}.weight"] = noise(shape, 1000 * seed * (index >= frozen) + index)
    for index in range(NORMS):
        made[f"norm.{index}.weight"] = noise((WIDTH,), 1000 * seed + 100 + index)
    return made


def noise(shape, seed):
    """Random bits, but for those that say that no weight is beyond 1 or below 1/128."""
    bits = torch.empty(shape, dtype=torch.int32)
    bits.random_(-(1 << 31), (1 << 31) - 1, generator=torch.Generator().manual_seed(seed))
    return bits.bitwise_and_(~EXPONENT).bitwise_or_(SMALL).view(torch.float32)


def is_same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name].dtype == each.dtype
        and found[name].shape == each.shape
        and torch.equal(found[name].detach().view(torch.int32), each.view(torch.int32))
        for name, each in wanted.items()
    )


class Way(NamedTuple):
    label: str
    needs: str
    name: str
    module: str

    def find(self):
        """Its class, with what it needs imported."""
        import_module(self.module)
        side = "_integrity_ours" if self.needs == "penstock" else "_integrity_peers"
        found = getattr(import_module(side), self.name)
        getattr(found, "prepare", int)()
        return found


WAYS = {
    "torch_save": Way("`torch.save`", "torch", "TorchSave", "torch"),
    "torch_save_mapped": Way(
        "`torch.save`, loaded with `mmap=True`", "torch", "TorchSaveMapped", "torch"
    ),
    "torch_save_legacy": Way("`torch.save`, legacy format", "torch", "TorchSaveLegacy", "torch"),
    "torch_save_renamed": Way(
        "`torch.save` to a new name, fsync, rename", "torch", "TorchSaveRenamed", "torch"
    ),
    "lightning": Way("Lightning's `Fabric.save`", "lightning", "Lightning", "lightning.fabric"),
    "fastpersist": Way("FastPersist, of DeepSpeed", "deepspeed", "FastPersist", "deepspeed.io"),
    "safetensors": Way("safetensors", "safetensors", "Safetensors", "safetensors.torch"),
    "runai": Way(
        "safetensors, loaded by Run:ai's streamer",
        "runai-model-streamer",
        "Runai",
        "runai_model_streamer",
    ),
    "fastsafetensors": Way(
        "safetensors, loaded by fastsafetensors",
        "fastsafetensors",
        "FastSafetensors",
        "fastsafetensors",
    ),
    "dcp": Way("DCP", "torch", "Dcp", "torch"),
    "dcp_safetensors": Way("DCP, its writer of safetensors", "torch", "DcpSafetensors", "torch"),
    "dcp_async": Way("DCP, asynchronous", "torch", "DcpAsync", "torch"),
    "torchsnapshot": Way("torchsnapshot", "torchsnapshot", "TorchSnapshot", "torchsnapshot"),
    "torchsnapshot_async": Way(
        "torchsnapshot, asynchronous", "torchsnapshot", "TorchSnapshotAsync", "torchsnapshot"
    ),
    "torch_checkpointing": Way(
        "torch_checkpointing",
        "torch_checkpointing",
        "TorchCheckpointing",
        "torch_checkpointing.checkpoint_manager",
    ),
    "tensorizer": Way("tensorizer", "tensorizer", "Tensorizer", "tensorizer"),
    "tensorizer_verified": Way(
        "tensorizer, `verify_hash=True`", "tensorizer", "TensorizerVerified", "tensorizer"
    ),
    "orbax": Way("orbax", "orbax-checkpoint", "Orbax", "orbax.checkpoint"),
    "zarr": Way("zarr", "zarr", "Zarr", "zarr"),
    "h5py": Way("h5py", "h5py", "H5py", "h5py"),
    "h5py_checked": Way("h5py, `fletcher32=True`", "h5py", "H5pyChecked", "h5py"),
    "savez": Way("`numpy.savez`", "numpy", "Savez", "numpy"),
    "ours": Way("**Penstock**, `save` over a path", "penstock", "Ours", "penstock.checkpoint"),
    "ours_encoded": Way(
        "**Penstock**, the same, encoded", "penstock", "OursEncoded", "penstock.checkpoint"
    ),
    "ours_retired": Way(
        "**Penstock**, `Checkpointer(keep=1)`, over retired files",
        "penstock",
        "OursRetired",
        "penstock.checkpoint",
    ),
    "ours_background": Way(
        "**Penstock**, the same, in the background",
        "penstock",
        "OursBackground",
        "penstock.checkpoint",
    ),
    "ours_incremental": Way(
        "**Penstock**, `Checkpointer(keep=1, incremental=True)`",
        "penstock",
        "OursIncremental",
        "penstock.checkpoint",
    ),
    "ours_dcp": Way("**Penstock**, by DCP", "penstock", "OursDcp", "penstock.checkpoint.dcp"),
}
