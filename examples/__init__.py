"""Models and training loops that the demo, the tests and the benchmarks share."""
