"""Answers that outlive the connections they are read on, and the gateway that makes them."""
