"""The representations Traced, Plan, Schedule and Program, and the parts that they share."""
