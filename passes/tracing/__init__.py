"""From a model and its loss to an fx graph."""
