"""How storages are encoded on their way to a tier, and decoded on their way back.

:mod:`.mover` is the way in, :mod:`.worker` the thread, :mod:`.scratch` the memory that it works in.
"""
