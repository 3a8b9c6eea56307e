"""How bytes move between memory and files.

Read in this order:

- ``engine``: the seam: requests, transfers, priorities;
- ``files``: files open for direct I/O, and what directory lies on what;
- ``jobs``: what engines share; ``threads``: the engine that runs everywhere; ``aio``: the default
  on Linux; ``cufile``: the optional one for device memory;
- ``arena``: reusable memory for transfers, on ``mapping`` (pages) and ``extents`` (free ranges).
"""
