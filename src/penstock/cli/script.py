"""Running a user's script in this process, as the interpreter itself does.

This module sets up a fresh ``__main__``, ``sys.argv`` and ``sys.path[0]`` as ``python script.py`` and
``python -m module`` do. The end is left to the interpreter: exceptions of the script go up through
``main``, so the interpreter handles exit codes, messages of ``sys.exit``, death by SIGINT and
``atexit``. Only ``sys.excepthook`` receives a traceback that begins at the script.
"""

from __future__ import annotations

import io
import itertools
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import Final, Protocol

from penstock.cli import notes, torch_import
from penstock.cli.output import say

_OUR_FOLDER: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_IMPORT_MACHINERY: Final = "<frozen importlib"
_HUGE_PAGES: Final = "THP_MEM_ALLOC_ENABLE"
"""Variable that makes torch request huge pages for large CPU tensors, read at the first of them."""


class Program(Protocol):
    """A program to run as ``__main__``."""

    def become_main(self) -> None:
        """Set up ``sys.argv``, ``sys.path`` and ``__main__``."""

    def run(self) -> None:
        """Run the program. Raises its exceptions."""


def find(target: str, arguments: Sequence[str], *, is_module: bool) -> Program:
    """Find the program to run.

    Args:
        target: A script, a folder or archive with a ``__main__``, or a module's name.
        arguments: Arguments after it on the command line.
        is_module: ``target`` is a module's name, as after ``-m``.

    Raises:
        SystemExit: The script cannot be opened; with the interpreter's own message and code.
    """
    if is_module:
        return _Module(target, arguments)
    # absolute but not normalized, as in the interpreter
    path = os.path.join(os.getcwd(), target)
    if pkgutil.get_importer(path) is not None:
        return _Container(path, target, arguments)
    _check_readable(path)
    return _File(path, target, arguments)


def find_program(words: Sequence[str], *, is_module: bool) -> Program:
    """Find the program of a command line: a script or a module, and its arguments.

    Raises:
        SystemExit: The script cannot be opened; the interpreter's own message was printed, and what
            to do if it is a program and no script.
    """
    try:
        return find(words[0], words[1:], is_module=is_module)
    except SystemExit:
        note = notes.program_on_path(words[0])
        if note is not None:
            say(note)
        raise


def request_huge_pages() -> None:
    """Have torch request huge pages for large tensors, unless the environment says otherwise."""
    os.environ.setdefault(_HUGE_PAGES, "1")


def run_as_main(program: Program) -> None:
    """Run ``program`` to its end; its exceptions are passed on, and shown without our frames."""
    program.become_main()
    try:
        program.run()
    except SystemExit:
        raise
    except BaseException:
        hook = getattr(sys, "excepthook", None)  # the script may have its own, or have deleted it
        if hook is not None:
            sys.excepthook = _without_our_frames(hook)
        raise


class _File:
    """The program of ``python script.py``."""

    def __init__(self, path: str, target: str, arguments: Sequence[str]) -> None:
        self._path = path
        self._argv = [target, *arguments]

    def become_main(self) -> None:
        sys.argv[:] = self._argv
        _set_first_path(os.path.dirname(os.path.realpath(self._path)))
        self._main = _fresh_main()

    def run(self) -> None:
        name, path = "__main__", self._path
        self._main.__file__ = path
        self._main.__dict__["__cached__"] = None
        if path.endswith(".pyc"):
            compiled = SourcelessFileLoader(name, path)
            self._main.__loader__ = compiled
            code = compiled.get_code(name)
        else:
            source = SourceFileLoader(name, path)
            self._main.__loader__ = source
            code = source.source_to_code(source.get_data(path), path)  # inherits no __future__
        exec(code, self._main.__dict__)  # type: ignore[arg-type]


class _Module:
    """The program of ``python -m module``."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self._name = name
        self._argv = ["-m", *arguments]

    def become_main(self) -> None:
        sys.argv[:] = self._argv
        _set_first_path(os.getcwd())
        _fresh_main()

    def run(self) -> None:
        # the function that the interpreter calls for -m; its frames are in tracebacks there too
        runpy._run_module_as_main(self._name)  # type: ignore[attr-defined]


class _Container:
    """The program of ``python folder`` or ``python archive.zip``, with a ``__main__.py`` in it."""

    def __init__(self, path: str, target: str, arguments: Sequence[str]) -> None:
        self._path = path
        self._argv = [target, *arguments]

    def become_main(self) -> None:
        sys.argv[:] = self._argv
        _set_first_path(self._path, even_if_safe=True)
        _fresh_main()

    def run(self) -> None:
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]


def _check_readable(path: str) -> None:
    try:
        io.open_code(path).close()
    except OSError as error:
        sys.stderr.write(
            f"{sys.orig_argv[0]}: can't open file {path!r}:"
            f" [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None


def _set_first_path(folder: str, *, even_if_safe: bool = False) -> None:
    """Replace the first entry of ``sys.path``, which the interpreter has set to our folder."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif even_if_safe:
        sys.path.insert(0, folder)


def _fresh_main() -> ModuleType:
    """Create a new ``__main__`` with the initial content of the interpreter's."""
    main = ModuleType("__main__")
    ours = sys.modules["__main__"]
    main.__dict__.update(__builtins__=sys.modules["builtins"])
    if "__annotations__" in ours.__dict__:  # until Python 3.13
        main.__dict__.update(__annotations__={})
    _displaced.append(ours)
    sys.modules["__main__"] = main
    return main


_displaced: list[ModuleType] = []
"""Replaced ``__main__`` modules, kept alive because their code is still running."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _without_our_frames(hook: _Hook) -> _Hook:
    def excepthook(
        kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> object:
        theirs = strip(tb)
        return hook(kind, error.with_traceback(theirs), theirs)

    return excepthook


def strip(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that led to the script, and of our import hook.

    Returns ``None`` if no frame is left, because the script did not compile.
    """
    frames = list(_frames(tb))
    codes = [frame.tb_frame.f_code for frame in frames]
    if run_as_main.__code__ in codes:
        del frames[: codes.index(run_as_main.__code__) + 1]
    hooked = any(_file(frame) == torch_import.__file__ for frame in frames)
    # the interpreter omits its own frames around a failed import
    left_out = (_OUR_FOLDER, _IMPORT_MACHINERY) if hooked else (_OUR_FOLDER,)
    kept = [frame for frame in frames if not _file(frame).startswith(left_out)]
    if all(_file(frame).startswith(_IMPORT_MACHINERY) for frame in kept):
        return None
    kept[-1].tb_next = None
    for frame, following in itertools.pairwise(kept):
        frame.tb_next = following
    return kept[0]


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
