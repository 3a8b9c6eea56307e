"""Files and tables made from what was observed: a trace, a plot of memory, side-by-side tables.

``trace`` writes what Perfetto opens, ``memory_plot`` draws memory over time (it needs matplotlib,
``pip install 'penstock[plot]'``), ``plan_plot`` one step of a plan;
``table`` lays two runs side by side in a terminal, ``plan_table`` the plans of policies.
"""
