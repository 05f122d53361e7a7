"""Passes from an exported graph to a functional one that can be cut into stages."""
