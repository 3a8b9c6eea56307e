"""Hot loops of codecs in Numba, without the GIL."""
