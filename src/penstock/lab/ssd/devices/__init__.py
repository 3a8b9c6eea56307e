"""Descriptions of SSDs, one TOML file each; see :mod:`penstock.lab.ssd.description`."""
