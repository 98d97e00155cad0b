"""Doing it: the controller's loop, the watches, the lease, the control connections and the planner's call."""
