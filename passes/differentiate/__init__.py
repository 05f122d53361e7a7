"""Every stage's forward and backward as graphs of their own."""
