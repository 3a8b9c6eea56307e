"""Research code: simulated SSDs, dry profiles, a zoo of networks, and the cost of checkpoints.

A run of training needs none of it, and outside this package only the command line imports it.
"""
