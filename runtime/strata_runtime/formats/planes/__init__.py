"""Weights as bit-planes: one stored copy that gives a model of every width."""
