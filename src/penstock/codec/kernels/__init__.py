"""The hot loops, by Numba, without the GIL; clear twins of them are in :mod:`penstock.codec.twins`."""
