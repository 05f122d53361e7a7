"""Plans are compared with the model before they train."""
