"""I/O engines, which move bytes between memory and files, and memory for transfers.

- ``engine``: the interface: requests, transfers, priorities;
- ``files``: files open for direct I/O;
- ``transfer_jobs``: the parts that engines share; ``threads``: the engine that runs everywhere;
  ``aio``: the default on Linux; ``cufile``: the optional one for device memory;
- ``arena``: reusable memory for transfers, on ``mapping`` (pages) and ``extents`` (free ranges).
"""
