"""Callbacks for programs that train by themselves. Each module needs the library of its name."""
