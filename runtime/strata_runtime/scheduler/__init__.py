"""Requests, scheduler, sampling: what stage 0 decides at every step. Knows no sockets."""
