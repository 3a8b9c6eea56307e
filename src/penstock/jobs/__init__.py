"""Jobs that share a machine: suspended in place, their memory on flash, and resumed.

Read in this order:

- ``job``, ``state``, ``space``, ``suspend``, ``recall``: one job, to flash and back, in its process;
- ``early``, ``signals``: a script that knows nothing of it, told by signal or by a manager;
- ``description``: what a manager is told; ``policy``: who computes, who sleeps;
- ``channel``: between manager and job; ``processes``: jobs from outside; ``logs``: what they print;
  ``command``: what they run; ``task``: one job's life; ``keeper``: what of it survives its process;
- ``manager``; ``limits``; ``budget``, ``enclosure``, ``cgroups``: what keeps the budget; ``interrupts``,
  ``ending``: how it ends; ``teller``; ``record``: what it leaves on disk; ``control``: its socket.
"""

from penstock.jobs.control import Client
from penstock.jobs.description import Description, JobSpec, Machine, load
from penstock.jobs.manager import Manager

__all__ = ["Client", "Description", "JobSpec", "Machine", "Manager", "load"]
