"""Commands of the lab: ``penstock ssd`` and ``penstock characterize``."""
