"""Models that people train, of others and written here from their papers, one a file."""
