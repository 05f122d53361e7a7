"""The text of each representation; those of schedules and programs parse back to equal values."""
