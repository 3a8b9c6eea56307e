"""Which parameter has which home: for as long as it is alive, and no other that has its place."""

import gc
import weakref

import torch
from torch import nn

from penstock import homed
from penstock.homed import home_of, move_out, settle


class Kept:
    """Stands for a home."""


def test_a_home_is_known_until_its_parameter_is_gone():
    parameter, home = nn.Parameter(torch.zeros(2)), Kept()
    settle(parameter, home)
    alive, home = weakref.ref(home), None
    gc.collect()
    assert home_of(parameter) is alive()
    assert home_of(nn.Parameter(torch.zeros(2))) is None
    del parameter
    gc.collect()
    assert alive() is None


def test_a_home_that_autograd_alone_keeps_the_parameter_of_is_still_known():
    """The Python object of a parameter outlives its last reference in Python."""
    parameter, home = nn.Parameter(torch.ones(2)), Kept()
    settle(parameter, home)
    graph = (parameter * 2).sum()
    del parameter
    gc.collect()
    node = graph.grad_fn.next_functions[0][0].next_functions[0][0]
    assert home_of(node.variable) is home


def test_a_parameter_that_has_the_address_of_one_that_is_gone_has_no_home():
    made = []
    first = nn.Parameter(torch.zeros(2))
    settle(first, Kept())
    address = id(first)
    del first
    while len(made) < 1000 and (not made or id(made[-1]) != address):
        made.append(nn.Parameter(torch.zeros(2)))
    assert all(home_of(each) is None for each in made)


def test_a_parameter_that_has_moved_out_may_get_another_home():
    parameter, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    one, two = Kept(), Kept()
    settle(parameter, one)
    move_out(other)
    assert home_of(parameter) is one
    move_out(parameter)
    assert home_of(parameter) is None
    settle(parameter, two)
    assert home_of(parameter) is two


def test_an_entry_of_a_parameter_that_is_gone_is_nobodys():
    """Where Ctrl-C came while it was to be forgotten."""
    gone, parameter = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    reference = weakref.ref(gone)
    del gone
    homed._homes[id(parameter)] = reference, Kept()
    assert home_of(parameter) is None
    one = Kept()
    settle(parameter, one)
    assert home_of(parameter) is one
