"""Pictures of plans, schedules and programs."""
