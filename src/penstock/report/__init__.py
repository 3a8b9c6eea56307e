"""Files and tables made from what was observed: a trace, a plot of memory, side-by-side tables.

``trace`` writes what Perfetto opens, ``memory_plot`` draws memory over time (it needs matplotlib,
``pip install 'penstock[plot]'``), ``table`` lays two runs side by side in a terminal.
"""
