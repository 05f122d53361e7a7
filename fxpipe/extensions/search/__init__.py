"""The search for the best schedule for given times and memory, with a bound and a certificate."""
