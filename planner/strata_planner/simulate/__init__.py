"""Discrete-event simulation of replicas under a trace: what the engine, the pipeline and the coordinator would do, and when.

`simulate(replicas, trace)` -> Outcome. Used by `strata simulate`, by benchmarks and by whoever judges layouts. Pure: the same
arguments give the same outcome.
"""

from strata_planner.simulate.outcome import Outcome, ReplicaUse, Served
from strata_planner.simulate.pricing import StagePricer
from strata_planner.simulate.replica import Limits, ReplicaModel, fleet
from strata_planner.simulate.routing import ReplicaLoad, least_loaded
from strata_planner.simulate.simulation import simulate
from strata_planner.simulate.stage import Batch, Chunk, Hop, StageModel, StageSeconds
from strata_planner.simulate.trace import Request, at_once, azure, of_clients, poisson, scaled, spread, within

__all__ = [
    "Batch",
    "Chunk",
    "Hop",
    "Limits",
    "Outcome",
    "ReplicaLoad",
    "ReplicaModel",
    "ReplicaUse",
    "Request",
    "Served",
    "StageModel",
    "StagePricer",
    "StageSeconds",
    "at_once",
    "azure",
    "fleet",
    "least_loaded",
    "of_clients",
    "poisson",
    "scaled",
    "simulate",
    "spread",
    "within",
]
