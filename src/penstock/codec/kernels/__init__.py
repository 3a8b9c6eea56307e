"""Hot loops of codecs in Numba, without the GIL; simple twins are in :mod:`penstock.codec.reference`."""
