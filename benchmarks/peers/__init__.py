"""Other engines on this processor, each in a process and an environment of its own. Used by `benchmarks.engine`.

`environments` installs them, `process` asks them; the other modules run inside: `served` is what they have in common.
"""
