"""In place of the artifact's feeder of requests: our admission, for a pipeline of ours. Called by `helix_artifact`.

The artifact asks its feeder for more requests whenever a prompt or a request is done, and its query manager what comes after each token.
"""

from typing import Any

from benchmarks.reference.helix_admission import Admission, Sequence


class Feeder:
    """Takes both questions over, from the moment that it is made."""

    def __init__(self, simulator: Any, admission: Admission) -> None:
        self._simulator = simulator
        self._queries = simulator.query_manager
        self._collect = self._queries.collect_finished_request
        self._queries.collect_finished_request = self.collect_finished_request
        self._admission = admission
        self._running: dict[int, Sequence] = {}  # by the artifact's number of the query
        simulator.register_offline_query_feeder(self)

    def run(self, until: float) -> None:
        self._issue()
        self._simulator.simulate(until=until)

    def check_launch_new_query(self, finished_request_type: Any) -> None:  # noqa: ARG002  the artifact names it
        self._issue()

    def collect_finished_request(self, current_time: float, request: Any) -> bool:
        """Whether the query is done on the nodes, so that the artifact takes back its KV: finished, or preempted."""
        query = self._queries.queries_on_the_fly[request.base_query_uid]
        sequence = self._running[query.query_uid]
        ends = query.next_iteration_idx > query.output_seq_length
        if ends:
            self._admission.end(sequence)
        stops = not ends and not self._admission.goes_on(sequence)
        if ends or stops:
            del self._running[query.query_uid]
        if not stops:
            return bool(self._collect(current_time=current_time, request=request))
        del self._queries.queries_on_the_fly[query.query_uid]
        return True

    def _issue(self) -> None:
        for sequence in self._admission.admit():
            self._running[self._queries.next_query_uid] = sequence
            self._queries.issue_query(
                creation_time=self._simulator.current_time,
                input_seq_length=sequence.tokens,
                output_seq_length=sequence.answer - sequence.produced,
            )
