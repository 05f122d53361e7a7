"""Ranks: processes that run one device's list each, and what goes between them."""
