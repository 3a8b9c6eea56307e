"""For research: simulated SSDs, dry profiles, a zoo of networks, and what checkpoints cost them.

Nothing that a run of training needs is here, and nothing outside but the command line imports it.
"""
