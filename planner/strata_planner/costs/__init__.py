"""What a stage costs: bytes (memory), seconds (latency) and transfers (communication), from shapes and rates alone."""
