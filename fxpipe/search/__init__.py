"""Search: the best schedule for given times and memory, a bound, and a certificate of both."""
