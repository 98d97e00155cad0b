"""Profiling: what this model's decoder layers take on this device, format by format, through the path that serves requests."""
