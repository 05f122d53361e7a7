"""What runs a stage: one interface, and its implementations."""
