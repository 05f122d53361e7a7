"""Submodules that are called as they are because the user asks for it."""
