"""A deployment as processes of this machine: what `strata up` and the demo run.

| module      | what                                                             |
|-------------|------------------------------------------------------------------|
| machine     | this machine -> the planner's Cluster                            |
| ports       | free ports, and the one the user asked for                       |
| launcher    | the parent of all processes, which has imported torch already    |
| deployment  | starts slots and gateway, drives the epochs, replaces what dies  |
| view        | the plan as a table, loading as bars                             |
"""
