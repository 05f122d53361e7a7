"""The text form of each representation: what is printed parses back to an equal value."""
