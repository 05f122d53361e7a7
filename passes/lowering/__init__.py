"""Schedule × Plan → Program, and Program → Program."""
