"""I/O engines, which move bytes between memory and files.

- ``engine``: the interface: requests, transfers, priorities;
- ``files``: files open for direct I/O;
- ``transfer_jobs``: the parts that engines share; ``threads``: the engine that runs everywhere;
  ``aio``: the default on Linux; ``cufile``: the optional one for device memory;
- ``mapping``: memory in pages; ``extents``: free ranges of something.
"""
