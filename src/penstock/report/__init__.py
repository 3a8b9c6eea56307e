"""Reports made from observations: traces, plots of memory, and side-by-side tables.

``trace`` writes a file for Perfetto, ``memory_plot`` draws memory over time (it needs matplotlib,
``pip install 'penstock[plot]'``), and ``plan_plot`` one step of a plan. ``table`` compares runs in a
terminal, ``plan_table`` the plans of policies.
"""
