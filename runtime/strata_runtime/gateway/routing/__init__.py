"""The gateway's way to the leaders: the journal of running requests, which replica takes one, and the links."""
