"""What ``make test-mutations`` goes through exists, and so does what is excused. Needs no device."""

import mutations

ONLY_OF_DEVICES = ("copy_across", "ready_event", "record_stream", "staging_for", "wait_stream")
"""What only code of devices calls."""
BESIDE = ("characterize", "cli", "testing")
"""Folders of programs that measure or judge, and move no memory of a training step."""


def test_each_excuse_is_of_a_site_and_each_site_is_once():
    keys = [site.key for site in mutations.all_sites()]
    assert len(keys) > 150
    assert len(keys) == len(set(keys))
    assert mutations.excuses().keys() <= set(keys)
    assert all(len(why) > 20 for why in mutations.excuses().values())


def test_each_file_has_a_site():
    found = {site.path for site in mutations.all_sites()}
    assert set(mutations.FILES) <= found


def test_no_file_that_waits_for_a_device_is_left_out():
    files = {path.relative_to(mutations.SOURCE) for path in mutations.SOURCE.rglob("*.py")}
    calling = {
        str(path)
        for path in files
        if path.parts[0] not in BESIDE
        and any(f"{name}(" in (mutations.SOURCE / path).read_text() for name in ONLY_OF_DEVICES)
    }
    assert calling <= set(mutations.paths())
