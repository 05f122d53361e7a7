"""Submodules that are called as they are: those that the user names, and those around lines that
cannot be traced."""
