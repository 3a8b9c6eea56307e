"""Weights whose home is a file on flash, and which are in memory only while something works with them."""
