"""A simulator of SSDs, from the host link to the plane, with weight updates on host, controller or die.

1. :mod:`.device`: the parts of an SSD, its array of cells, :mod:`.cells`, and the settings of its
   controller, :mod:`.control`; :mod:`.description`: devices as TOML files, and the presets.
2. :mod:`.optimizers`: states and passes of the optimizers, from their arithmetic;
   :mod:`.processing_element`: the arithmetic of a processing element on the die, word by word.
3. :mod:`.update`: bytes that a weight update moves; :mod:`.closed_form`: its time in closed form.
4. :mod:`.energy`: its energy in joules, within three boundaries; :mod:`.wear`: its cost in endurance.
5. :mod:`.graph`: units, stages and the resources they occupy; :mod:`.operations`: a weight update as such
   a graph; :mod:`.simulation`: its simulation by events (:mod:`.graph_events`) or timelines
   (:mod:`.timeline`, with Numba :mod:`.timeline_kernel`), and extrapolation.
6. :mod:`.drive`: the event-driven engine, with :mod:`.events`, :mod:`.link`, :mod:`.requests`,
   :mod:`.pages`, :mod:`.cleaning`, :mod:`.mapping`, :mod:`.cache`, :mod:`.flash` (and :mod:`.commands`,
   :mod:`.powercap`) and :mod:`.measure`; :mod:`.ftl` (and :mod:`.blocks`, :mod:`.allocation`,
   :mod:`.superpages`) and :mod:`.aging`, which take no simulated time; :mod:`.traces`, and MQSim's files:
   :mod:`.mqsim`, :mod:`.mqsim_flows` (and :mod:`.mqsim_xml`, :mod:`.mqsim_random`).
7. :mod:`.faults`: wrong bits and what corrects them; :mod:`.bit_flips`: put into memory; :mod:`.service`:
   a drive as a curve that plans are made with.

Imports no torch.
"""

from penstock.lab.ssd.closed_form import Placement, Step, step, steps
from penstock.lab.ssd.description import describe, load, presets, with_field
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.update import Gradient, Update

__all__ = [
    "Device",
    "Gradient",
    "Placement",
    "Step",
    "Update",
    "describe",
    "load",
    "presets",
    "step",
    "steps",
    "with_field",
]
