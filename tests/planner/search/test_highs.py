"""Standard output is the plan's: HiGHS is asked in a process of its own, as it prints but once."""

import subprocess
import sys

PROGRAM = """
import highspy, pulp
from strata_planner.search.highs import optimise

print("before")
model = pulp.LpProblem("one", pulp.LpMaximize)
x = model.add_variable("x", 0, 3, cat=pulp.LpInteger)
model += 2 * x
optimise(model, timeLimit=1.0, gapRel=0.1)
print(model.objective.value())
"""


def test_nothing_but_the_programs_own_words_is_on_standard_output() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout == "before\n6.0\n"
