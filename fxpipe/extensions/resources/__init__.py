"""Extension: verifies that what a stage has besides buffers is there where it is needed."""
