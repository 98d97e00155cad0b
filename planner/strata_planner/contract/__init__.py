"""The contract that planner, runtime and operator share: Plan, roles, control messages, frames. Torch-free.

| module  | what crosses which border                                         |
|---------|-------------------------------------------------------------------|
| plan    | planner -> operator -> ConfigMap; `strata plan --json`            |
| roles   | plan -> slot                                                      |
| control | controller <-> slot and gateway, JSON                             |
| frames  | stage <-> stage, gateway <-> leader, msgpack                      |
| formats | bytes of a stored weight: planner counts, runtime allocates       |
| devices | measured or published rates of a device                          |
| keys    | the secret of an epoch -> connection keys                         |
| values  | the strict, frozen base of the JSON values                        |
"""
