"""Passes over captured graphs."""
