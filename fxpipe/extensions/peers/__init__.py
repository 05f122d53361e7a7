"""Schedules in the forms of other libraries: what they write, and what would go wrong there."""
