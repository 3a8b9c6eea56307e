"""Fewer bytes: each codec behind one seam, lossless by default.

Read in this order:

- ``base``: the seam: frames, bounds known beforehand, what may be lost;
- ``registry``: codecs by name and by number, and the one that made a frame;
- ``zero_value``, ``narrow``, ``exponent``: every bit comes back;
- ``positive``: only what a ReLU's backward asks for;
- ``casts``, ``int8``: values within a stated bound;
- ``chain``: ``zero-value`` and another;
- ``kernels``: the hot loops, and ``twins``: the same in a few clear lines each;
- ``device``: forms that run where the tensor is.
"""
