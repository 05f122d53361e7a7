"""The search for the cut whose slowest stage is the fastest, with a lower bound that proves it."""
