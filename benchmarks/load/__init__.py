"""Load on a running deployment: clients that know what every answer must be, and the memory of the processes meanwhile."""
