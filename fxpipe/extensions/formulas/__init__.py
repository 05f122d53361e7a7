"""Closed forms of a schedule's makespan, bubble and memory, by sympy."""
