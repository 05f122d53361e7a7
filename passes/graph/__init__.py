"""From the traced graph to a functional one that can be cut."""
