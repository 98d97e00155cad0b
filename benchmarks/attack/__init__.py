"""Attacks on a running deployment: what strangers, tenants and holders of one key may send, as reproducible values and as named probes."""
