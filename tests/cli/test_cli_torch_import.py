"""The import hook, on a module that stands in for torch."""

import importlib
import importlib.util
import sys

import pytest

from penstock.cli import script, torch_import


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A module whose import is waited for; its text can be written."""
    name = "stand_in_for_torch"
    monkeypatch.setattr(torch_import, "_TORCH", name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}.py").write_text("loader, done = __spec__.loader, True\n")
    yield tmp_path / f"{name}.py"
    sys.modules.pop(name, None)


def test_the_action_comes_after_the_module_and_once(stand_in):
    seen = []
    torch_import.when_imported(lambda: seen.append(sys.modules[stand_in.stem].done))
    importlib.import_module("colorsys")
    assert importlib.util.find_spec(stand_in.stem).origin == str(stand_in)  # looking is no import
    assert seen == []
    for _ in range(2):
        module = importlib.import_module(stand_in.stem)
    assert seen == [True]
    assert module.loader is module.__spec__.loader is module.__loader__
    assert type(module.loader).__name__ == "SourceFileLoader"
    assert not any(isinstance(finder, torch_import._Finder) for finder in sys.meta_path)


def test_what_is_there_already_is_not_waited_for(stand_in):
    importlib.import_module(stand_in.stem)
    seen = []
    torch_import.when_imported(lambda: seen.append(1))
    assert seen == [1]


def test_an_import_that_failed_can_be_tried_again(stand_in):
    good = stand_in.read_text()
    seen = []
    torch_import.when_imported(lambda: seen.append(1))
    stand_in.write_text("raise ImportError('half installed')")
    with pytest.raises(ImportError, match="half installed"):
        importlib.import_module(stand_in.stem)
    assert seen == []
    stand_in.write_text(good)
    importlib.import_module(stand_in.stem)
    assert seen == [1]


def test_what_the_action_raises_ends_the_import(stand_in):
    def refuse():
        raise SystemExit(2)

    torch_import.when_imported(refuse)
    with pytest.raises(SystemExit):
        importlib.import_module(stand_in.stem)
    assert stand_in.stem not in sys.modules


class Imports:
    """A program that imports what does not work."""

    def __init__(self, text):
        self.code = compile(text, "/theirs.py", "exec")

    def become_main(self):
        pass

    def run(self):
        exec(self.code, {})


def files(tb):
    return [frame.tb_frame.f_code.co_filename for frame in script._frames(tb)]


def test_tracebacks_begin_at_the_script_and_leave_the_hook_out(stand_in, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *details: shown.append(details))
    torch_import.when_imported(lambda: None)
    stand_in.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError) as caught:
        script.run_as_main(Imports(f"def f():\n import {stand_in.stem}\nf()"))
    assert torch_import.__file__ in files(caught.tb)  # else there is nothing to leave out
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert shown[0][:2] == (ZeroDivisionError, caught.value)
    assert shown[0][2] is caught.value.__traceback__
    assert files(shown[0][2])[-3:] == ["/theirs.py", "/theirs.py", str(stand_in)]
    left = files(shown[0][2])
    assert not [file for file in left if file.startswith(("<frozen", script._OUR_FOLDER))]
