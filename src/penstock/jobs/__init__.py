"""Manager of jobs that share a machine: some compute while others sleep with their memory on flash.

Suspending a single job is in :mod:`penstock.swap`. Read in this order:

- ``description``: the configuration; ``policy``: the choice of the jobs that compute and sleep;
- ``processes``: jobs' processes; ``logs``: their output; ``command``: their command lines; ``task``: one
  job's life;
- ``manager``; ``limits``; ``budget``, ``job_cgroups``, ``cgroups``: enforcement of the budget;
  ``interrupts``, ``termination``: its end; ``progress``: its messages; ``record``: state on disk;
  ``control``: its socket.
"""

from penstock.jobs.control import Client
from penstock.jobs.description import Description, JobsMachine, JobSpec, load
from penstock.jobs.manager import Manager

__all__ = ["Client", "Description", "JobSpec", "JobsMachine", "Manager", "load"]
