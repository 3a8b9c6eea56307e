"""Hosts that may be missing, and weights to compare."""

import warnings

import pytest
import torch


def needs(*names):
    """Return the first of some packages; skip the test if one is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(map(pytest.importorskip, names))
    return found[0]


def weights_of(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
