"""Stages as processes: transport, stage executor, workers, the slot and its epochs."""
