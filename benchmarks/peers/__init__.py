"""Other engines on this processor, each in a process and an environment of its own. Used by `benchmarks.engine` and `benchmarks.serving_peers`.

`environments` installs them; `process` asks those of `benchmarks.engine`, whose modules run inside: `served` is what they have in common. `http_servers` starts
those that serve over HTTP.
"""
