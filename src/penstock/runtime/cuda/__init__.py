"""How storages of a CUDA device move: streams, events, pinned staging. :mod:`.mover` is the way in."""
