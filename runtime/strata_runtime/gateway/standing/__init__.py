"""Standing orders as a gateway carries them out: what to do is decided by values, done over slots' control ports."""
