"""One line on the terminal while something takes long."""
