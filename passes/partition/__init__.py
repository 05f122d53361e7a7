"""Which stage computes what: measured, assigned, and cut into a Plan."""
