"""Codecs, which encode tensors in fewer bytes behind one interface; lossless by default.

- ``base``: the interface: frames, size bounds known in advance, and losses;
- ``registry``: codecs by name and by number, and the one that made a frame;
- ``zero_value``, and ``csr`` to compare it with; ``narrow``, ``byteplane``: every bit comes back;
- ``positive``: only what a ReLU's backward asks for;
- ``casts``, ``int8`` on ``blockwise``: values within a stated bound;
- ``chain``: several, one after the other;
- ``kernels``: the hot loops, and ``twins``: the same in a few simple lines each;
- ``device``: forms that run on the tensor's device.
"""
