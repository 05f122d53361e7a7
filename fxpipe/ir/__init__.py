"""The representations, each declared on a page: Plan, Schedule, Program, and what they share."""
