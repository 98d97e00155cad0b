"""Names of slots: what a deployment calls the devices of one type that it takes on one node.

Used by `assembly`; the operator and `strata up` give these names to pods and processes. A DNS-1123 label with room for the
suffixes that Kubernetes adds.
"""

import hashlib
import re

MAX_SLOT_NAME = 52  # a StatefulSet's pods carry its name, an ordinal and a revision hash within 63 characters
_DIGEST = 6


def slot_name(deployment: str, node: str, device_type: str) -> str:
    """`<deployment>-<node>-<type>` in lower case; a digest keeps apart what other changes would merge."""
    plain = f"{deployment}-{node}-{device_type}".lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if slug == plain and len(slug) <= MAX_SLOT_NAME:
        return slug
    digest = hashlib.sha256(plain.encode()).hexdigest()[:_DIGEST]
    return f"{slug[: MAX_SLOT_NAME - _DIGEST - 1].rstrip('-')}-{digest}"
