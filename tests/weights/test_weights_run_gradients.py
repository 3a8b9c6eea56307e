"""Memory of gradients that wait under ``penstock run``, in one process and in one of several ranks."""

import pytest

import penstock
from penstock.cli.run import _with_gradients


@pytest.mark.parametrize(
    ("rank", "settings", "given", "memory"),
    [
        (None, {"memory": "64MiB"}, None, None),
        (None, {"memory": "64MiB", "weights_memory": "8MiB"}, None, 0),
        (None, {"weights_memory": "8MiB"}, None, 0),
        (None, {"memory": "64MiB", "weights_memory": "8MiB"}, 5, 5),
        ("0", {"memory": "64MiB"}, None, 0),  # replicas' gradients are charged to nobody
    ],
)
def test_what_limits_gradients_of_weights_at_home(
    rank, settings, given, memory, *, tmp_path, monkeypatch
):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    with penstock.offload(weights="flash", flash=str(tmp_path), **settings) as session:
        assert _with_gradients({"gradient_memory": given}, session) == {"gradient_memory": memory}
