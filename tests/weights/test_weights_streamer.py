"""Whatever is done with weights, and in whichever order: bytes, the limit, and nothing left behind."""

import gc
import warnings

import numpy as np
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_weights_faults import failing

from penstock.core.errors import PenstockWarning, TransferError
from penstock.homed import home_of
from penstock.store.account import Account
from penstock.weights.brought import HostMemory
from penstock.weights.homes import WeightFiles
from penstock.weights.model import rest_weights
from penstock.weights.resting import RestingParameter
from penstock.weights.streamer import WeightStreamer
from weights_rig import WEIGHT_BYTES, Chain, bits, built, scripted

COUNT = 6
LIMIT = 3 * WEIGHT_BYTES
which = st.integers(0, COUNT - 1)


class Streaming(RuleBasedStateMachine):
    """A streamer beside tensors in memory to which the same is done."""

    def __init__(self, directory):
        super().__init__()
        self.scripting = scripted()
        self.engine = self.scripting.__enter__()
        self.model = built(lambda: Chain(COUNT))
        self.expected = [bits(layer.weight) for layer in self.model.layers]
        self.account = Account(LIMIT, name="weights")
        files = WeightFiles(str(directory))

        def rest(model, check):
            return rest_weights(model, check, places=files, floor_bytes=1)

        self.streamer = WeightStreamer(rest, account=self.account, memory=HostMemory(self.account))
        self.streamer.add(self.model)
        self.homes = [home_of(layer.weight) for layer in self.model.layers]
        self.entered = []
        self.held = []
        self.brought = []
        self.aliases = []
        self.left = set()

    def weight(self, index):
        return self.model.layers[index].weight

    def change(self, index, target):
        """Change a weight where ``target`` refers to it, and what is expected."""
        target.mul_(1.5)
        self.expected[index].mul_(1.5)

    @precondition(lambda self: len(self.entered) < 3)
    @rule(index=which)
    def enter(self, index):
        self.streamer.enter(self.model.layers[index], ())
        self.entered.append(index)
        home = home_of(self.weight(index))
        if home is not None and index in self.left:  # by the first call of the module
            self.homes[index] = home
            self.left.remove(index)
        assert type(self.weight(index)) is not RestingParameter

    @precondition(lambda self: self.entered)
    @rule()
    def leave(self):
        self.streamer.leave(self.model.layers[self.entered.pop()])

    @precondition(lambda self: self.entered)
    @rule(kind=st.sampled_from(["version", "data", "array"]))
    def change_in_module(self, kind):
        index = self.entered[-1]
        with torch.no_grad():
            weight = self.weight(index)
            if kind == "array":
                weight.detach().numpy()[:] *= np.float32(1.5)
                self.expected[index].mul_(1.5)
            else:
                self.change(index, weight if kind == "version" else weight.data)

    @precondition(lambda self: len(self.held) < 2)
    @rule(index=which)
    def hold(self, index):
        assume(index not in self.left)
        self.homes[index].hold()
        self.held.append((index, self.homes[index]))

    @precondition(lambda self: self.held)
    @rule(changed=st.booleans())
    def let_go(self, changed):
        index, home = self.held.pop()
        if changed:  # as an optimizer's kernels, which count no version
            with torch._C.DisableTorchFunctionSubclass():
                values = self.weight(index).detach().numpy()
            values[:] *= np.float32(1.5)
            self.expected[index].mul_(1.5)
            del values
        home.let_go(changed=changed)

    @precondition(lambda self: len(self.brought) < 2)
    @rule(index=which)
    def bring(self, index):
        assume(index not in self.left)
        values = self.streamer._keeper.bring(self.homes[index], self.weight(index))
        assert torch.equal(values, self.expected[index])
        self.brought.append(values)

    @rule()
    def drop_what_was_brought(self):
        self.brought.clear()

    @rule(index=which)
    def touch(self, index):
        with torch.no_grad():
            assert torch.equal(self.weight(index) + 0, self.expected[index])

    @rule(index=which)
    def change_by_touch(self, index):
        with torch.no_grad():
            self.change(index, self.weight(index))

    @rule(index=which)
    def replace(self, index):
        former = self.expected[index].clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenstockWarning)
            self.weight(index).data = self.expected[index] + 1
        self.expected[index].add_(1)
        if home_of(self.weight(index)) is None:  # as somebody refers to the memory that it had
            self.left.add(index)
        assert all(torch.equal(alias, former) for at, alias in self.aliases if at == index)
        self.aliases = [(at, alias) for at, alias in self.aliases if at != index]

    @precondition(lambda self: len(self.aliases) < 2)
    @rule(index=which)
    def lend(self, index):
        self.aliases.append((index, self.weight(index).data))

    @precondition(lambda self: self.aliases)
    @rule(ends=st.booleans())
    def change_by_alias(self, ends):
        index, alias = self.aliases[-1]
        assert torch.equal(alias, self.expected[index])
        self.change(index, alias)
        del alias
        if ends:
            self.aliases.pop()

    @rule(times=st.integers(0, 3))
    def fail_writes(self, times):
        self.engine.fault = failing("write", times)

    @precondition(lambda self: not self.entered)
    @rule()
    def end_step(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenstockWarning)
            self.streamer.end_step()

    @invariant()
    def values_are_right(self):
        for index, expected in enumerate(self.expected):
            assert torch.equal(bits(self.weight(index)), expected), index

    @invariant()
    def the_limit_is_kept(self):
        if not self.streamer.forced:
            assert self.account.used_bytes <= LIMIT

    def teardown(self):
        while self.entered:
            self.leave()
        while self.held:
            self.let_go(changed=False)
        self.brought.clear()
        self.close_and_look()
        self.aliases.clear()
        self.model = self.homes = None
        self.scripting.__exit__(None, None, None)
        gc.collect()  # an error of ``close`` names its frames, and they name weights
        assert self.account.used_bytes == 0, self.account.held_by()

    def close_and_look(self):
        lent = {index for index, _ in self.aliases} | self.left
        failed = False
        try:
            self.streamer.close()
        except TransferError:
            failed = True
        self.values_are_right()
        for index, home in enumerate(self.homes):
            assert home.keeper is None
            if not failed and index not in lent:
                assert home.is_at_rest, index
                assert type(self.weight(index)) is RestingParameter


def test_whatever_is_done_the_values_are_right(disk_path):
    run_state_machine_as_test(
        lambda: Streaming(disk_path),
        settings=settings(
            max_examples=10,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
