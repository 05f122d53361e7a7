"""The text form of each representation: its parser reads what it prints back to an equal value."""
