"""How others save, for ``integrity.py``: over what is there, and loaded anew.

What a way needs is imported by it alone, for each interpreter has only some of it.
"""

import os
import shutil
from typing import ClassVar

import torch
import torch.distributed.checkpoint as dcp


class TorchSave:
    legacy, mapped = False, False

    def save(self, state, path):
        path.mkdir(exist_ok=True)
        torch.save(state, path / "state.pt", _use_new_zipfile_serialization=not self.legacy)

    def load(self, path, state):
        return torch.load(path / "state.pt", weights_only=True, mmap=self.mapped)


class TorchSaveLegacy(TorchSave):
    legacy = True


class TorchSaveMapped(TorchSave):
    mapped = True


class TorchSaveRenamed(TorchSave):
    """What a careful script does by hand."""

    def save(self, state, path):
        path.mkdir(exist_ok=True)
        with open(path / "new.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path / "new.pt", path / "state.pt")


class Lightning:
    def __init__(self):
        from lightning.fabric import Fabric  # noqa: PLC0415

        self.fabric = Fabric(accelerator="cpu", devices=1)

    def save(self, state, path):
        self.fabric.save(path / "state.ckpt", state)

    def load(self, path, state):
        return self.fabric.load(path / "state.ckpt")


class Safetensors:
    def save(self, state, path):
        from safetensors.torch import save_file  # noqa: PLC0415

        path.mkdir(exist_ok=True)
        save_file(state, path / "state.safetensors")

    def load(self, path, state):
        from safetensors.torch import load_file  # noqa: PLC0415

        return load_file(path / "state.safetensors")


class Runai(Safetensors):
    def load(self, path, state):
        from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path / "state.safetensors"))
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


class FastSafetensors(Safetensors):
    def load(self, path, state):
        from fastsafetensors import fastsafe_open  # noqa: PLC0415

        file = str(path / "state.safetensors")
        with fastsafe_open(filenames=[file], nogds=True, device="cpu") as found:
            return {name: found.get_tensor(name).clone() for name in found.keys()}  # noqa: SIM118


class Savez:
    def save(self, state, path):
        import numpy  # noqa: PLC0415

        path.mkdir(exist_ok=True)
        numpy.savez(path / "state.npz", **{name: each.numpy() for name, each in state.items()})

    def load(self, path, state):
        import numpy  # noqa: PLC0415

        with numpy.load(path / "state.npz") as found:
            return {name: torch.from_numpy(found[name]) for name in found.files}


class H5py:
    options: ClassVar = {}

    def save(self, state, path):
        import h5py  # noqa: PLC0415

        path.mkdir(exist_ok=True)
        with h5py.File(path / "state.h5", "w") as file:
            for name, each in state.items():
                file.create_dataset(name, data=each.numpy(), **self.options)

    def load(self, path, state):
        import h5py  # noqa: PLC0415

        with h5py.File(path / "state.h5", "r") as file:
            return {name: torch.from_numpy(each[:]) for name, each in file.items()}


class H5pyChecked(H5py):
    options: ClassVar = {"fletcher32": True}


class Zarr:
    def save(self, state, path):
        import zarr  # noqa: PLC0415

        group = zarr.open_group(path, mode="w")
        for name, each in state.items():
            group.create_array(name, data=each.numpy())

    def load(self, path, state):
        import zarr  # noqa: PLC0415

        group = zarr.open_group(path, mode="r")
        return {name: torch.from_numpy(each[...]) for name, each in group.arrays()}


class Dcp:
    def writer(self, path):
        return dcp.FileSystemWriter(path, sync_files=True)

    def reader(self, path):
        return dcp.FileSystemReader(path)

    def save(self, state, path):
        dcp.save(state, storage_writer=self.writer(path), no_dist=True)

    def load(self, path, state):
        dcp.load(state, storage_reader=self.reader(path), no_dist=True)
        return state


class DcpSafetensors(Dcp):
    def writer(self, path):
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415

        return HuggingFaceStorageWriter(path=str(path))

    def reader(self, path):
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: PLC0415

        return HuggingFaceStorageReader(path=str(path))


class DcpAsync(Dcp):
    def save(self, state, path):
        future = dcp.async_save(state, storage_writer=self.writer(path), no_dist=True)
        getattr(future, "upload_completion", future).result()


class TorchSnapshot:
    def save(self, state, path):
        import torchsnapshot  # noqa: PLC0415

        torchsnapshot.Snapshot.take(str(path), {"s": torchsnapshot.StateDict(**state)})

    def load(self, path, state):
        import torchsnapshot  # noqa: PLC0415

        held = torchsnapshot.StateDict(**state)
        torchsnapshot.Snapshot(str(path)).restore({"s": held})
        return dict(held)


class TorchSnapshotAsync(TorchSnapshot):
    def save(self, state, path):
        import torchsnapshot  # noqa: PLC0415

        held = torchsnapshot.StateDict(**state)
        torchsnapshot.Snapshot.async_take(str(path), {"s": held}).wait()


class TorchCheckpointing:
    """Without O_DIRECT: with it, its writes are of lengths that ext4 refuses."""

    def __init__(self):
        from torch_checkpointing.checkpoint_manager import CheckpointManager  # noqa: PLC0415
        from torch_checkpointing.config import SyncCheckpointSaverConfig  # noqa: PLC0415
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: PLC0415

        saver, storage = (
            SyncCheckpointSaverConfig(),
            LocalFileSystemStorageConfig(use_direct_io=False),
        )
        config = CheckpointManager.Config(save=saver, storage_config=storage)
        self.manager = CheckpointManager(config)

    def save(self, state, path):
        shutil.rmtree(path, ignore_errors=True)  # it replaces nothing, and says so
        self.manager.save(str(path), {"state": state})

    def load(self, path, state):
        return self.manager.load(str(path), into={"state": None})["state"]


class Tensorizer:
    verify = False

    def save(self, state, path):
        from tensorizer import TensorSerializer  # noqa: PLC0415

        path.mkdir(exist_ok=True)
        serializer = TensorSerializer(str(path / "state.tensors"))
        serializer.write_state_dict(state)
        serializer.close()

    def load(self, path, state):
        from tensorizer import TensorDeserializer  # noqa: PLC0415

        file = str(path / "state.tensors")
        with TensorDeserializer(file, device="cpu", verify_hash=self.verify) as found:
            return {name: found[name].detach().clone() for name in found.keys()}  # noqa: SIM118


class TensorizerVerified(Tensorizer):
    verify = True


class FastPersist(TorchSave):
    """DeepSpeed's writer: libaio, O_DIRECT, two halves of a pinned buffer; torch loads."""

    made = None

    @staticmethod
    def prepare():
        """Before forks, each of which would look whether the extension is to be compiled."""
        from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415

        AsyncIOBuilder().load()

    def save(self, state, path):
        import _fastpersist  # noqa: PLC0415

        self.made = self.made or _fastpersist.writer_maker()
        path.mkdir(exist_ok=True)
        (path / "state.pt").unlink(
            missing_ok=True
        )  # it would not cut off what is there, and misplace its end
        writer = self.made(path / "state.pt")
        torch.save(obj=state, f=writer, _use_new_zipfile_serialization=False)
        writer.close()


class Orbax:
    def save(self, state, path):
        import orbax.checkpoint as orbax  # noqa: PLC0415

        checkpointer = orbax.StandardCheckpointer()
        arrays = {name: each.numpy() for name, each in state.items()}
        checkpointer.save(path, arrays, force=True)
        checkpointer.wait_until_finished()
        checkpointer.close()

    def load(self, path, state):
        import numpy  # noqa: PLC0415
        import orbax.checkpoint as orbax  # noqa: PLC0415

        arrays = {name: each.numpy() for name, each in state.items()}
        with orbax.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(path, arrays)
        return {name: torch.from_numpy(numpy.array(each)) for name, each in found.items()}
