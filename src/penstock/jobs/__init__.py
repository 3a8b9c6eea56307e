"""The manager of jobs that share a machine: who computes, and who sleeps with its memory on flash.

How one job sleeps is in :mod:`penstock.swap`. Read in this order:

- ``description``: what a manager is told; ``policy``: which job computes, which sleeps;
- ``processes``: jobs from outside; ``logs``: what they print; ``command``: what they run; ``task``: one
  job's life;
- ``manager``; ``limits``; ``budget``, ``enclosure``, ``cgroups``: what keeps the budget; ``interrupts``,
  ``ending``: how it ends; ``teller``; ``record``: what it leaves on disk; ``control``: its socket.
"""

from penstock.jobs.control import Client
from penstock.jobs.description import Description, JobSpec, Machine, load
from penstock.jobs.manager import Manager

__all__ = ["Client", "Description", "JobSpec", "Machine", "Manager", "load"]
