"""Build what the emulated device takes: torch's CUDA build, and libraries in place of NVIDIA's.

``python tests/device/build.py DIRECTORY [--torch 2.13.0]`` installs torch and the Triton that it asks
for into ``DIRECTORY/torch`` (1.8 GB, from the package index, without the packages of NVIDIA that torch
asks for), and compiles to ``DIRECTORY/lib``:

- ``libcudart.so.N``: the emulated runtime in ``runtime/``; functions that torch imports but nobody calls
  here answer "not supported";
- for each other library of NVIDIA's that torch's shared objects need (cuBLAS, cuDNN, NCCL, ...) one
  of such answers alone. Which library, function and version: that is read from the wheel.

Needs a C++ compiler: ``$CXX``, ``c++``, ``g++``, ``clang++``, or that of the package ``ziglang``, which
is installed if there is none. Nothing is done again that is there already.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
RUNTIME = "libcudart.so"
OF_OTHERS = {"cufile.cpp": "libcufile.so", "driver.cpp": "libcuda.so"}
"""Sources of libraries that are not the runtime."""
VENDOR = ("libcu", "libnccl", "libnvrtc", "libnvshmem", "libnvToolsExt")
"""How the names of libraries begin that are replaced."""
UNVERSIONED = {
    "cuFile": "libcufile.so",
    "cusparseLt": "libcusparseLt.so",
    "nccl": "libnccl.so",
    "nvshmem": "libnvshmem_host.so",
    "cu": "libcuda.so",
}
"""How functions begin of libraries that give theirs no versions."""
LAYOUTS = {
    12: {
        "PROPERTIES_BYTES": 1032,
        "MULTI_PROCESSOR_COUNT": 388,
        "CONCURRENT_KERNELS": 576,
        "PCI_BUS_ID": 584,
        "ASYNC_ENGINE_COUNT": 600,
        "UNIFIED_ADDRESSING": 604,
        "L2_CACHE_SIZE": 616,
        "MAX_THREADS_PER_MULTIPROCESSOR": 624,
        "STREAM_PRIORITIES_SUPPORTED": 628,
        "SHARED_MEM_PER_MULTIPROCESSOR": 640,
        "REGS_PER_MULTIPROCESSOR": 648,
        "SHARED_MEM_PER_BLOCK_OPTIN": 696,
    },
    13: {
        "PROPERTIES_BYTES": 1008,
        "MULTI_PROCESSOR_COUNT": 384,
        "CONCURRENT_KERNELS": 560,
        "PCI_BUS_ID": 568,
        "ASYNC_ENGINE_COUNT": 584,
        "UNIFIED_ADDRESSING": 588,
        "L2_CACHE_SIZE": 596,
        "MAX_THREADS_PER_MULTIPROCESSOR": 604,
        "STREAM_PRIORITIES_SUPPORTED": 608,
        "SHARED_MEM_PER_MULTIPROCESSOR": 624,
        "REGS_PER_MULTIPROCESSOR": 632,
        "SHARED_MEM_PER_BLOCK_OPTIN": 672,
    },
}
"""Offsets in ``cudaDeviceProp``, by CUDA's major version (public headers of its package on the index)."""
COMMON_LAYOUT = {
    "UUID": 256,
    "TOTAL_GLOBAL_MEM": 288,
    "SHARED_MEM_PER_BLOCK": 296,
    "REGS_PER_BLOCK": 304,
    "WARP_SIZE": 308,
    "MAX_THREADS_PER_BLOCK": 320,
    "MAX_THREADS_DIM": 324,
    "MAX_GRID_SIZE": 336,
    "MAJOR": 360,
    "MINOR": 364,
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torch", default="2.13.0", help="its version")
    given = parser.parse_args()
    try:
        build(given.directory.resolve(), given.torch)
    except (subprocess.CalledProcessError, LookupError) as error:
        sys.exit(f"the emulated device cannot be built: {error}")


def build(directory: Path, torch_version: str) -> None:
    """Make ``directory`` hold all of it."""
    directory.mkdir(parents=True, exist_ok=True)
    install_torch(directory / "torch", torch_version)
    install_triton(directory / "torch", torch_version)
    compiler = find_compiler()
    mark = directory / "lib" / "built-from"
    wanted = digest_of(torch_version, compiler)
    if mark.is_file() and mark.read_text() == wanted:
        return
    shutil.rmtree(mark.parent, ignore_errors=True)
    mark.parent.mkdir()
    compile_libraries(directory / "torch" / "torch" / "lib", mark.parent, compiler)
    mark.write_text(wanted)


def install_torch(target: Path, version: str) -> None:
    """Install the package index's own build for CUDA: three equal signs ask for exactly that name."""
    if (target / f"torch-{version}.dist-info").is_dir() and (target / ".complete").exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    pip("--no-deps", "--no-compile", "--target", str(target), f"torch==={version}")
    (target / ".complete").touch()


def install_triton(target: Path, torch_version: str) -> None:
    """Install the one that torch asks for: kernels are interpreted and compiled without a GPU."""
    metadata = target / f"torch-{torch_version}.dist-info" / "METADATA"
    found = re.search(r"^Requires-Dist: triton==([\w.]+)", metadata.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"{metadata} asks for no version of Triton")
    if (target / ".complete-triton").exists():
        return
    shutil.rmtree(target / "triton", ignore_errors=True)
    # torch has a directory `bin`, too: pip warns that it leaves that as it is
    pip("--quiet", "--no-deps", "--no-compile", "--target", str(target), f"triton=={found[1]}")
    (target / ".complete-triton").touch()


def pip(*arguments: str) -> None:
    """Install something; pip's own message says what is wrong."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def find_compiler() -> list[str]:
    """The command of a C++ compiler."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is None:
        print("no C++ compiler on PATH: installing the package ziglang, which has one")
        pip("ziglang")
    return [sys.executable, "-m", "ziglang", "c++"]


def digest_of(*facts: object) -> str:
    """What the libraries were made of."""
    found = hashlib.sha256(repr(facts).encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        found.update(path.read_bytes())
    return found.hexdigest()


def compile_libraries(torch_libraries: Path, target: Path, compiler: list[str]) -> None:
    """Compile the runtime, and stubs of everything else that is not here."""
    imports = vendor_imports(torch_libraries)
    runtime = next((name for name in imports if name.startswith(RUNTIME)), None)
    if runtime is None:
        raise LookupError(f"torch in {torch_libraries} imports nothing from {RUNTIME}")
    major = int(runtime.rpartition(".")[2])
    if major not in LAYOUTS:
        raise LookupError(f"torch was built for CUDA {major}; known are {sorted(LAYOUTS)}")
    constants = COMMON_LAYOUT | LAYOUTS[major] | {"CUDA_MAJOR": major}
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    (target / "layout.h").write_text("\n".join(["#pragma once", *lines]) + "\n")
    for library, functions in imports.items():
        stem = library.partition(".so")[0] + ".so"
        sources = [
            source
            for source in sorted(SOURCES.glob("*.cpp"))
            if OF_OTHERS.get(source.name, RUNTIME) == stem
        ]
        text = "".join(source.read_text() for source in sources)
        missing = [name for name in functions if f" {name}(" not in text]
        versions = sorted(set(functions.values()) - {""})
        link(library, sources, missing, versions, target, compiler)


def vendor_imports(directory: Path) -> dict[str, dict[str, str]]:
    """By library: the functions that the shared objects of a directory want, and their versions."""
    elffile = importlib.import_module("elftools.elf.elffile")
    found: dict[str, dict[str, str]] = defaultdict(dict)
    unversioned: set[str] = set()
    defined: set[str] = set()
    for path in sorted(directory.glob("*.so")):
        with path.open("rb") as file:
            elf = elffile.ELFFile(file)
            for name in needed_by(elf):
                if name.startswith(VENDOR):
                    found[name]  # there may be nothing that it wants of it
            versions = versions_of(elf)
            symbols = elf.get_section_by_name(".dynsym")
            indices = elf.get_section_by_name(".gnu.version")
            for number, symbol in enumerate(symbols.iter_symbols()):
                if symbol["st_shndx"] != "SHN_UNDEF":
                    defined.add(symbol.name)
                    continue
                index = indices.get_symbol(number)["ndx"]
                library, version = versions.get(index, ("", ""))
                if library.startswith(VENDOR):
                    found[library][symbol.name] = version
                elif not library and symbol["st_info"]["type"] != "STT_OBJECT":
                    unversioned.add(symbol.name)
    for name in unversioned - defined:
        stem = next((stem for begin, stem in UNVERSIONED.items() if name.startswith(begin)), None)
        for library in found if stem else ():
            if library.startswith(f"{stem}."):
                found[library][name] = ""
    return found


def needed_by(elf: object) -> Iterator[str]:
    """Names of libraries that a shared object asks for."""
    for tag in elf.get_section_by_name(".dynamic").iter_tags():  # type: ignore[attr-defined]
        if tag.entry.d_tag == "DT_NEEDED":
            yield tag.needed


def versions_of(elf: object) -> dict[object, tuple[str, str]]:
    """By number of a symbol's version: the library that has it, and its name."""
    section = elf.get_section_by_name(".gnu.version_r")  # type: ignore[attr-defined]
    if section is None:
        return {}
    return {
        each["vna_other"]: (library.name, each.name)
        for library, entries in section.iter_versions()
        for each in entries
    }


def link(  # noqa: PLR0917
    library: str,
    sources: list[Path],
    missing: list[str],
    versions: list[str],
    target: Path,
    compiler: list[str],
) -> None:
    """Compile one library: sources, and functions that answer "not supported"."""
    stubs = target / f"{library}.stubs.cpp"
    script = target / f"{library}.map"
    answers = [f'extern "C" int {name}() {{ return 801; }}' for name in sorted(missing)]
    stubs.write_text("\n".join([*answers, ""]))
    if len(versions) > 1:
        raise LookupError(f"torch wants functions of several versions of {library}: {versions}")
    script.write_text(f"{''.join(versions)} {{ global: *; }};\n")
    flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", f"-I{target}", "-pthread"]
    command = [*compiler, *flags, *map(str, sources), str(stubs), "-o", str(target / library)]
    command += [f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
