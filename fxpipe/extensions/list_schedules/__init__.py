"""``fxpipe.list_schedule``: schedules that rules make; and two of the library that are made so."""
