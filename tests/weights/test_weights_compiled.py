"""A whole model that is compiled, whose graph needs all of its weights at once."""

import pytest
import torch

from penstock import PenstockWarning
from weights_rig import (
    WEIGHT_BYTES,
    Chain,
    assert_same,
    bits,
    built,
    inputs,
    on_flash,
    scripted,
    state_of,
)

LIMIT = 3 * WEIGHT_BYTES


@pytest.mark.parametrize("how", ["in place", "before", "in the session"])
def test_a_whole_model_that_is_compiled_is_told_to_compile_its_blocks(how, disk_path):
    """It needs all weights at once, over the limit; the results are right."""
    expected, x = built(Chain), inputs(1)[0]
    loss = expected(x).square().mean()
    loss.backward()
    called = model = built(Chain)
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "before":
        called = torch.compile(model, backend="aot_eager")
    with scripted(), on_flash(called, disk_path, limit=LIMIT) as session:
        if how == "in the session":
            called = torch.compile(model, backend="aot_eager")
        with pytest.warns(PenstockWarning, match="compiled Chain needs all .*: compile each block"):
            found = called(x).square().mean()
        found.backward()
        called(x)  # it warns once
        assert "in use: the compiled Chain needs" in session._weights.note()
    assert_same(bits(found), bits(loss))
    assert_same(state_of(model), state_of(expected))
