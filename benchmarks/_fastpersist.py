"""DeepSpeed's FastPersist, where it is installed: libaio, O_DIRECT, two halves of a pinned buffer."""

import os

import torch

BLOCK_BYTES, BUFFER_BYTES = 8 << 20, 64 << 20


def writer_maker():
    """What opens a writer of a path, for ``torch.save``; the extension is compiled if need be."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.io.fast_file_writer as writer  # noqa: PLC0415
    from deepspeed.io import FastFileWriter, FastFileWriterConfig  # noqa: PLC0415
    from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415

    class Casts:  # DeepSpeed has no build of this one for CPUs; a view does the same
        def load(self):
            return self

        def cast_to_byte_tensor(self, tensors):
            return [each.reshape(-1).view(torch.uint8) for each in tensors]

    writer.UtilsBuilder = Casts
    handle = AsyncIOBuilder().load().aio_handle(
        block_size=BLOCK_BYTES, queue_depth=16, single_submit=False, overlap_events=True,
        intra_op_parallelism=1,
    )  # fmt: skip
    pinned = handle.new_cpu_locked_tensor(BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
    config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned, double_buffer=True)
    return lambda path: FastFileWriter(file_path=str(path), config=config)
