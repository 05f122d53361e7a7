"""Pictures of plans, schedules, programs and simulations, and of what a verifier refused."""
