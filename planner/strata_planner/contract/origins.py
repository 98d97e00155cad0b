"""Origins of web pages, as browsers send them: what the object's `gateway.allowedOrigins` and `--allowed-origins` list.

Used by the operator's types and by the gateway's flags, which refuse the same. No regular expressions beyond RE2's.
"""

ORIGIN_PATTERN = r"^([*]|[a-z][-a-z0-9+.]*://([-a-z0-9._]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$"
ORIGIN_RULE = (
    "write scheme://host or scheme://host:port in lower case, without a path and without a slash at the end, "
    "or * for all pages"
)
LONGEST_ORIGIN = 253 + 50  # a host's name, and its scheme and port
MOST_ORIGINS = 64
