"""The wire: sockets with keys and heartbeats, and a small client of a leader. Knows no roles, no models."""
