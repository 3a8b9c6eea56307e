"""Codecs, which encode tensors in fewer bytes behind one interface; lossless by default.

- ``base``: the interface: frames, size bounds known in advance, and losses;
- ``registry``: codecs by name and by number, and the one that made a frame;
- ``zero_value``, ``narrow``, ``exponent``: every bit comes back;
- ``positive``: only what a ReLU's backward asks for;
- ``casts``, ``int8``: values within a stated bound;
- ``chain``: ``zero-value`` and another;
- ``kernels``: the hot loops;
- ``device``: forms that run on the tensor's device.
"""
