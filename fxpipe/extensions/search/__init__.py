"""The search for the best schedule for given times and memory, and a bound."""
