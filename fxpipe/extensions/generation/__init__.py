"""Pipelined generation with the causal language models of transformers."""
