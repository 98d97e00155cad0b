"""What `--costs` chooses: the sources that a plan's seconds come from, in order of trust. Used by `strata plan`.

    (nothing), auto     operator tables of the extra `profiles` where it is installed, then the roofline
    FILE ...            layer tables first, one file each, then as for auto
    roofline            the roofline alone, whatever is installed

Knows the choices, not what the sources know.
"""

from collections.abc import Sequence
from pathlib import Path

from strata_operator.api.load import read_text
from strata_operator.errors import InvalidInputError
from strata_planner.costs.operators import OperatorTables
from strata_planner.costs.source import LatencySource
from strata_planner.costs.tables import LayerTable, LayerTables

AUTO, ROOFLINE = "auto", "roofline"


def latency_sources(chosen: Sequence[str]) -> tuple[LatencySource, ...]:
    """Raises InvalidInputError for a file that cannot be read or a mix that means nothing, InputError for a wrong table."""
    if ROOFLINE in chosen:
        if set(chosen) != {ROOFLINE}:
            raise InvalidInputError("--costs", ["roofline means nothing else: leave it out to use tables"])
        return ()
    files = [Path(each) for each in chosen if each != AUTO]
    tables = tuple(LayerTable.from_yaml(read_text(file), str(file)) for file in files)
    measured: tuple[LatencySource, ...] = (LayerTables(tables),) if tables else ()
    installed = OperatorTables.installed()
    return (*measured, installed) if installed else measured
