"""Choosing the plan: candidates (device orders x micro-batches), their lower bounds, the exact ILP of one of them."""
