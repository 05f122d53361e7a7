"""A warning, once, where steps compile again and again, which says what changes."""
