"""Twins of :mod:`penstock.codec.kernels` in a few lines of NumPy each: slow, simple, the same bytes."""
