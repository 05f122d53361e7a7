"""The verifiers: one for each representation; every fault at once."""
