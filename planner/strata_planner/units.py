"""Quantities as people read and write them; used in messages, tables and files."""

import re
from decimal import Decimal

# As Kubernetes writes bytes: 40Gi, 1.5G, 2e9.
BYTES_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]*)?)(?:[eE]([0-9]{1,2})|([kMGTPE]|[KMGTPE]i))?")
_POWERS = {"k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def human_bytes(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def parse_bytes(text: str) -> int:
    """Whole bytes of a quantity that BYTES_PATTERN matches."""
    match = BYTES_PATTERN.fullmatch(text)
    assert match is not None, text
    number, exponent, unit = match.groups()
    if exponent:
        return int(Decimal(number).scaleb(int(exponent)))
    base = 1024 if (unit or "").endswith("i") else 1000
    return int(Decimal(number) * base ** _POWERS.get((unit or "").removesuffix("i").replace("K", "k"), 0))
