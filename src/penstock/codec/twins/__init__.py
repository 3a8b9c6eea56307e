"""What :mod:`penstock.codec.kernels` does, in a few lines of NumPy each: slow, clear, the same bytes."""
