"""Which plan: exact search of one pipeline (`exact`), search over replicas and groups (`layouts`), and the front door (`planning`)."""
