"""The error tree is the one that its docstring draws, and each error says what a user needs."""

import errno
import os
import pickle
import re
from concurrent.futures import CancelledError

import pytest

from penstock.core import errors

LINE = re.compile(
    r"^    (?P<indent>[│ ]*)(?:[├└]── )?(?P<name>\w+)(?: \((?P<builtin>\w+)\))?(?: {2,}|$)"
)


def drawn_tree():
    """(name, built-in base, parent) of every class in the module's docstring."""
    path, found = [], []
    lines = errors.__doc__.split("::\n")[1].split("\n\nEach message")[0].splitlines()
    for line in filter(str.strip, lines):
        match = LINE.match(line)
        assert match, line
        depth = len(match["indent"]) // 4 + ("──" in line)
        del path[depth:]
        found.append((match["name"], match["builtin"], path[-1] if path else None))
        path.append(match["name"])
    return found


@pytest.mark.parametrize(("name", "builtin", "parent"), drawn_tree())
def test_the_tree_is_as_drawn(name, builtin, parent):
    bases = [base.__name__ for base in getattr(errors, name).__bases__]
    expected = [base for base in (parent, builtin) if base]
    assert bases == (expected or ["Exception"])


def test_every_error_is_drawn():
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes == {name for name, _, _ in drawn_tree()}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EDQUOT, errors.NoSpaceError),
        (errno.EIO, errors.TransferError),
        (errno.EROFS, errors.TransferError),
    ],
)
def test_transfer_errors_say_what_where_and_how_much(tmp_path, code, kind):
    error = errors.transfer_error(
        errno=code,
        op="write",
        path=str(tmp_path),
        offset_bytes=4096,
        nbytes=8192,
        moved_bytes=512,
    )
    assert type(error) is kind
    assert isinstance(error, OSError)
    assert (error.errno, error.op, error.path) == (code, "write", str(tmp_path))
    assert (error.offset_bytes, error.nbytes, error.moved_bytes) == (4096, 8192, 512)
    assert error.free_bytes > 0
    for part in ("write of 8192 bytes", "offset 4096", str(tmp_path), "512 bytes", "free space"):
        assert part in str(error)
    assert ("free some space" in str(error)) == (kind is errors.NoSpaceError)


def test_of_what_moves_no_bytes_none_are_told(tmp_path):
    """A directory that cannot be opened was "open of 0 bytes at offset 0 of ... after 0 bytes"."""
    path = str(tmp_path / "file")
    error = errors.transfer_error(
        errno=errno.ENOTDIR, op="open", path=path, offset_bytes=0, nbytes=0
    )
    assert str(error) == f"open of {path!r} failed: Not a directory"


def test_free_space_that_is_not_known_is_not_told(tmp_path):
    """A missing file was said to have "free space: -1 bytes"."""
    path = str(tmp_path / "missing")
    error = errors.transfer_error(
        errno=errno.ENOENT, op="read", path=path, offset_bytes=0, nbytes=8
    )
    assert "free space" not in str(error)


def test_free_space_is_told_where_a_file_finds_none(tmp_path):
    """Making a file moves no bytes, but needs space."""
    error = errors.transfer_error(
        errno=errno.ENOSPC, op="open", path=str(tmp_path), offset_bytes=0, nbytes=0
    )
    assert "(free space: " in str(error)


def test_free_space_of_a_missing_directory(tmp_path):
    assert errors.free_space_bytes(str(tmp_path)) > 0
    assert errors.free_space_bytes(str(tmp_path / "missing")) == -1


def test_a_file_system_without_blocks_does_not_know_its_space(monkeypatch):
    """It is not full."""
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: nothing)
    assert errors.free_space_bytes("/") == -1


def test_a_budget_error_carries_its_figures():
    error = errors.BudgetError("too small", slot="conv1/0", limit_bytes=10, least_bytes=20)
    assert (str(error), error.slot, error.limit_bytes, error.least_bytes) == (
        "too small",
        "conv1/0",
        10,
        20,
    )
    assert isinstance(error, MemoryError)


ALL_KINDS = [
    errors.NoSpaceError(
        errno=errno.ENOSPC, op="write", path="p", offset_bytes=1, nbytes=2, free_bytes=3
    ),
    errors.ChecksumError("other bytes"),
    errors.BudgetError("no room", slot="s", limit_bytes=1, least_bytes=2),
    errors.ClosedError("closed"),
    errors.DatasetError("damaged"),
    CancelledError(),
]


@pytest.mark.parametrize("error", ALL_KINDS, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_whole(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (found.args, str(found), vars(found)) == (error.args, str(error), vars(error))
    if isinstance(error, OSError):
        assert (found.errno, found.strerror) == (error.errno, error.strerror)


@pytest.mark.parametrize("error", ALL_KINDS, ids=lambda error: type(error).__name__)
def test_a_renewed_error_is_equal_and_keeps_no_frame(error):
    error.add_note("a note")
    cause = error.__cause__ = OSError(errno.EIO, "cause")
    with pytest.raises(type(error)):
        raise error
    again = errors.renewed(error)
    assert again is not error
    assert again.__traceback__ is None
    assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
    assert vars(again) == vars(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
    assert again.__cause__ is cause
    again.add_note("another")
    assert error.__notes__ == ["a note"]


def test_an_error_of_unknown_making_is_renewed_as_itself():
    error = UnicodeDecodeError("utf-8", b"x", 0, 1, "why")
    with pytest.raises(UnicodeDecodeError):
        raise error
    assert errors.renewed(error) is error
    assert error.__traceback__ is None
