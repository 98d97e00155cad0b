"""A gateway process that reaches every leader and answers 200 to whatever it is asked."""

import os
from collections.abc import Sequence

from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.control import gateway_request_decoder
from tests.operator.fake_processes import parse, serve, serve_http
from tests.operator.fakes import FakeGateway

DRAFTED = DraftCounts(100, 400, 300, 500)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    gateway = FakeGateway()
    gateway.incarnation, gateway.drafted = str(os.getpid()), DRAFTED
    serve_http(options.port)
    serve(f"{options.control_host}:{options.control_port}", gateway_request_decoder, gateway.handle, lambda: None)
    return 0
