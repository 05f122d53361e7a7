"""What the losses of micro-batches are means over, and so how they are weighed."""
