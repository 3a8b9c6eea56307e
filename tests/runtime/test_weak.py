"""References to tensors that somebody else may own by now."""

import weakref

import torch

from penstock.runtime.storage import OwningWeakRef, TensorRef


class Preserved:
    """As a storage that an old torch has kept for later."""

    told = 0

    def _fix_weakref(self):
        self.told += 1


def test_an_old_torch_is_told_who_holds_it_again():
    preserved, gone = Preserved(), []
    ref = OwningWeakRef(preserved, gone.append)
    assert ref() is preserved
    assert ref() is preserved
    assert preserved.told == 2
    del preserved
    assert ref() is None
    assert gone == [ref]


def test_a_storage_that_only_torch_held_may_be_held_again():
    tensor = torch.arange(1000.0)
    ref, real = OwningWeakRef(tensor.untyped_storage()), weakref.ref(tensor.untyped_storage())
    storage = ref()
    assert storage is real()
    del tensor
    assert storage.nbytes() == 4000
    assert bytes(storage[4:8]) == bytes([0, 0, 128, 63])
    del storage
    assert ref() is None
    assert issubclass(TensorRef, weakref.ref)
