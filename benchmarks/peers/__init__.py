"""Contenders that train one model the same way, each in processes of its own, told when to step."""
