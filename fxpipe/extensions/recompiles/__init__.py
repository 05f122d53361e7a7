"""Warns, once, where steps compile again and again, and says what changes."""
