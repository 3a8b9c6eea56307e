"""The kernels of Triton make the bits of the operators of torch, by Triton's interpreter; they compile.

In processes of their own: whether kernels are interpreted is decided when Triton is imported.

Triton comes with torch's builds for CUDA. So these tests run where one is, and on the emulated device a
missing Triton fails them.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

try:
    import emulator
except ImportError:  # torch's build for CPUs, or a real GPU
    emulator = None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        emulator is None and importlib.util.find_spec("triton") is None, reason="there is no Triton"
    ),
]

INTERPRETED = """
import numpy as np, torch
from penstock.codec.base import DTYPES, ITEMSIZE
from penstock.codec.device import FORMS, base, sparse, triton_sparse
from penstock.codec.device.words import WORD
from penstock.testing.codec_samples import sources

for word in WORD.values():
    assert sparse.agrees(triton_sparse, torch.device("cpu"), word)

calls = []
used = type("Counting", (), {})()
for name in ("survey", "compact", "row_counts", "expand"):
    def counting(*args, call=getattr(triton_sparse, name), name=name):
        calls.append(name)
        return call(*args)
    setattr(used, name, counting)

for codec in ("zero-value",):
    for dtype in ("uint8", "bfloat16", "float32", "float64"):
        size = ITEMSIZE[dtype]
        for count in (0, 1, 63, 64, 65, 255, 256, 257, 1024, 2500):
            for name, source in sources(dtype, count * size + (count % 3 and size - 1), seed=count):
                memory = torch.from_numpy(source)
                sparse.kernels_for = lambda device, word: None
                wanted = base.encode_tensor(codec, memory, dtype)
                sparse.kernels_for = lambda device, word: used
                frame = base.encode_tensor(codec, memory, dtype)
                assert torch.equal(frame, wanted), (codec, dtype, count, name)
                back = base.decode_tensor(frame, source.size, codec_name=codec, dtype=dtype)
                assert torch.equal(back, memory), (codec, dtype, count, name)
assert set(calls) == {"survey", "compact", "row_counts", "expand"}
print(len(calls), "kernels")
"""


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from penstock.codec.device import triton_sparse

VALUES = {"row": 256, "octets": 32, "rows": 4}
POINTERS = {"bitmap": "*u8", "counts": "*i32", "starts": "*i64"}
for word in ("*u8", "*i64"):
    for name in ("_survey", "_compact", "_row_counts", "_expand"):
        kernel = getattr(triton_sparse, name)
        types = {
            each: "constexpr" if each in VALUES else POINTERS.get(each)
            or (word if each in ("words", "packed") else "i64")
            for each in kernel.arg_names
        }
        values = {(i,): VALUES[each] for i, each in enumerate(types) if each in VALUES}
        source = ASTSource(fn=kernel, signature=types, constexprs=values)
        found = compile(source, target=GPUTarget("cuda", 80, 32))
        assert found.asm["cubin"]
        print(name, word)
"""

ON_THE_DEVICE = """
import torch
import plugin
from penstock.codec.device import sparse

plugin.prepare()
device = torch.device("cuda", torch.cuda.device_count() - 1)
print(sparse.kernels_for(device, torch.int32) is not None, torch._C._cuda_hasPrimaryContext(0))
"""


def run(program, **environment):
    command = [sys.executable, "-W", "ignore", "-c", program]
    settings = {"env": os.environ | environment, "capture_output": True, "text": True}
    result = subprocess.run(command, **settings, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_kernel_makes_the_bits_of_the_operators():
    assert int(run(INTERPRETED, TRITON_INTERPRET="1").split()[0]) > 100


def test_every_kernel_compiles(tmp_path):
    """To machine code of a GPU; that takes none."""
    printed = run(COMPILED, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(printed.splitlines()) == 8


@pytest.mark.skipif(emulator is None, reason="for the emulated device")
@pytest.mark.parametrize("interpreted", [False, True])
def test_the_emulated_device_has_kernels_only_where_they_are_interpreted(tmp_path, interpreted):
    """It runs no machine code, and then the operators of torch are used."""
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": str(int(interpreted))}
    on_the_first_device = torch.cuda.device_count() == 1
    assert run(ON_THE_DEVICE, **settings) == f"{interpreted} {on_the_first_device}\n"
