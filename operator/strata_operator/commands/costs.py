"""What `--costs` chooses: the sources that a plan's seconds come from, in order of trust. Used by `strata plan`.

    (nothing), auto     operator tables of the extra `profiles` where it is installed, then the roofline
    FILE ...            layer tables first, one file each, then as for auto
    vllm, trtllm, sglang    operator tables as that serving engine runs them, to compare with its published figures
    roofline            the roofline alone, whatever is installed

Knows the choices, not what the sources know.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from strata_operator.api.load import read_text
from strata_operator.errors import InvalidInputError
from strata_planner.costs.operator_data import ENGINES
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
    engines = sorted({*ENGINES} & {*chosen})
    if len(engines) > 1:
        raise InvalidInputError("--costs", [f"{' and '.join(engines)}: a plan is priced as one engine; name one"])
    files = [Path(each) for each in chosen if each not in {AUTO, *ENGINES}]
    tables = tuple(LayerTable.from_yaml(read_text(file), str(file)) for file in files)
    measured: tuple[LatencySource, ...] = (LayerTables(tables),) if tables else ()
    installed = OperatorTables.installed()
    if engines:
        if installed is None:
            problem = (
                f"{engines[0]} needs the operator tables, which are not installed: pip install 'strata-llm[profiles]'"
            )
            raise InvalidInputError("--costs", [problem])
        installed = replace(installed, engine=engines[0])
    return (*measured, installed) if installed else measured
