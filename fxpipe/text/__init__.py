"""The text forms: what each representation prints, its parser reads back to an equal value."""
