"""What a stage has besides buffers, verified to be there where instructions need it."""
