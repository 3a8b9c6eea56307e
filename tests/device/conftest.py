"""What is here needs the emulated device: without it nothing is collected."""

try:
    import emulator  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]
