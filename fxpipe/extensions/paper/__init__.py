"""Training on paper: devices and clusters that are not here, and plans for them; nothing is run."""
