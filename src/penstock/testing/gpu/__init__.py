"""Checks of a machine with a GPU: ``python -m penstock.testing.gpu``; see :mod:`.command`."""
