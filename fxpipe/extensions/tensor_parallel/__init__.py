"""Stages whose parameters are DTensors, divided over further dimensions of a mesh."""
