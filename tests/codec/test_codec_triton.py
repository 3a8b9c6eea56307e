"""The kernels of Triton make the bits of the operators of torch, by Triton's interpreter; they compile.

In processes of their own: whether kernels are interpreted is decided when Triton is imported.

Triton comes with torch's builds for CUDA. So these tests run where one is, and on the emulated device a
missing Triton fails them.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import preloaded

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
import importlib, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

name, word, *kernels = sys.argv[1:]
module = importlib.import_module("penstock.codec.device." + name)
VALUES = {"row": 256, "octets": 32, "rows": 4, "size": {"*i16": 2, "*i32": 4}.get(word)}
POINTERS = {
    **dict.fromkeys(["bitmap", "payload", "faults"], "*u8"),
    **dict.fromkeys(["source", "halves", "target"], "*i16"),
    **dict.fromkeys(["heads", "first_heads", "counts"], "*i32"),
    **dict.fromkeys(["starts", "ends", "lengths"], "*i64"),
    **dict.fromkeys(["words", "packed"], word),
}
for each in kernels:
    kernel = getattr(module, each)
    for architecture, number in ((80, "i64"), (90, "i32")):
        types = {
            name: "constexpr" if name in VALUES else POINTERS.get(name, number)
            for name in kernel.arg_names
        }
        values = {(i,): VALUES[name] for i, name in enumerate(types) if name in VALUES}
        source = ASTSource(fn=kernel, signature=types, constexprs=values)
        assert compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]
        print(each, word, architecture)
"""

KERNELS = {
    "triton_sparse": ["_survey", "_compact", "_row_counts", "_expand"],
    "triton_exponent": ["_survey", "_pack", "_read_heads", "_unpack"],
}

ON_THE_DEVICE = """
import sys
import emulated_operators
import torch
import plugin
from penstock.codec.device import exponent, sparse

plugin.prepare()
for name in emulated_operators.UNTRIED:
    del sys.modules[name]
device = torch.device("cuda", torch.cuda.device_count() - 1)
found = [form.kernels_for(device, torch.int32) is not None for form in (sparse, exponent)]
print(*found, torch._C._cuda_hasPrimaryContext(0))
"""


def run(*program, **environment):
    """Run a program, its text behind ``-c``, and return what it prints."""
    words, settings = ["-W", "ignore", *program], os.environ | environment
    if environment["TRITON_INTERPRET"] == "0":  # as it is in the process that is forked
        result = preloaded.run(words, env=settings)
    else:
        result = subprocess.run(
            [sys.executable, *words],
            env=settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_kernel_makes_the_bits_of_the_operators():
    assert int(run("-c", INTERPRETED, TRITON_INTERPRET="1").split()[0]) > 100


def test_every_kernel_of_exponent_makes_the_bits_of_the_host():
    program = Path(__file__).with_name("interpreted_exponent.py")
    compared, refused, accepted = run(str(program), TRITON_INTERPRET="1").split()
    assert int(compared) > 100
    assert min(int(refused), int(accepted)) > 20


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("triton_sparse", "*u8"),
        ("triton_sparse", "*i64"),
        ("triton_exponent", "*i16"),
        ("triton_exponent", "*i32"),
    ],
)
def test_every_kernel_compiles(tmp_path, module, word):
    """To machine code of two kinds of GPU; that takes none."""
    program = "-c", COMPILED, module, word, *KERNELS[module]
    printed = run(*program, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(printed.splitlines()) == 8


@pytest.mark.skipif(emulator is None, reason="for the emulated device")
@pytest.mark.parametrize("interpreted", [False, True])
def test_the_emulated_device_has_kernels_only_where_they_are_interpreted(tmp_path, interpreted):
    """It runs no machine code, and then the operators of torch are used."""
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": str(int(interpreted))}
    on_the_first_device = torch.cuda.device_count() == 1
    assert (
        run("-c", ON_THE_DEVICE, **settings)
        == f"{interpreted} {interpreted} {on_the_first_device}\n"
    )
