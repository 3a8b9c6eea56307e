"""References of :mod:`penstock.codec.kernels` in a few lines of NumPy each: slow, with the same bytes."""
