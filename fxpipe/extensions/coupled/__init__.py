"""A warning of optimizers that compute across parameters, where stages step by themselves."""
