"""Measuring: what this device can do, and what the layers of a model take on it."""
