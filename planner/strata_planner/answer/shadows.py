"""What a plan's shadows cost and bring, as people read it: a row for each node that may be lost."""

from collections import Counter

from rich.table import Table

from strata_planner.contract.formats import BITS_OF_FORMAT
from strata_planner.contract.plan import Plan
from strata_planner.contract.rates import READ_BYTES_PER_SECOND
from strata_planner.contract.shadows import Shadow, kept_bytes
from strata_planner.units import human_bytes


def shadow_table(plan: Plan) -> Table:
    """Takeovers read on all slots side by side: the busiest one counts."""
    slots = len({each.slot for each in plan.shadows})
    cost = sum(kept_bytes(plan.shadows).values())
    table = Table(title=f"shadows: {human_bytes(cost)} of host memory on {slots} slots", title_justify="left")
    table.add_column("node lost")
    table.add_column("kept by", overflow="fold")
    for column in ("bytes", "read after it", "without", "sooner by"):
        table.add_column(column, justify="right")
    for node in sorted({each.against for each in plan.shadows}):
        mine = [each for each in plan.shadows if each.against == node]
        with_, without = busiest_reads(mine)
        table.add_row(
            node,
            "; ".join(f"{each.slot}: {_parts(each)}" for each in mine),
            human_bytes(sum(each.size_bytes for each in mine)),
            human_bytes(with_),
            human_bytes(without),
            f"{(without - with_) / READ_BYTES_PER_SECOND:.2g} s or more",
        )
    table.caption = (
        f"seconds at {READ_BYTES_PER_SECOND / 1e9:.1f} GB/s, files in the page cache: a disk or a hub is slower"
    )
    table.caption_justify = "left"
    return table


def busiest_reads(shadows: list[Shadow]) -> tuple[int, int]:
    """Bytes that one slot reads from files after a loss: with what is kept, and without."""
    return max(each.read_bytes - each.size_bytes for each in shadows), max(each.read_bytes for each in shadows)


def _parts(shadow: Shadow) -> str:
    """`layers 4-7 (4x4), head`."""
    tables = [name for name, has in (("embedding", shadow.embedding), ("head", shadow.head)) if has]
    if not shadow.layers:
        return ", ".join(tables)
    counts = Counter(BITS_OF_FORMAT[name] for name in shadow.format)
    bits = " ".join(f"{count}x{each}" for each, count in sorted(counts.items(), reverse=True))
    return ", ".join([f"layers {_ranges(shadow.layers)} ({bits})", *tables])


def _ranges(layers: tuple[int, ...]) -> str:
    """`0-3, 7`."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)
