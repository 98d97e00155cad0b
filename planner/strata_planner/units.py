"""Quantities as people read them; used in messages and tables."""


def human_bytes(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
