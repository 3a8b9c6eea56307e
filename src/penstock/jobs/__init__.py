"""Jobs that share a machine: suspended in place, their memory on flash, and resumed."""
