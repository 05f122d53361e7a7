"""The verifiers, one for each representation. Each reports all faults at once."""
