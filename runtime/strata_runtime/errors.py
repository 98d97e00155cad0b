"""What the runtime raises, by what the caller should do next.

    RuntimeFaultError
    ├── InputError              fix the request, checkpoint or role; retrying does not help
    │   └── RequestRefusedError one request can never run here; the others go on
    ├── PoolExhaustedError      a slot's pages are used up: the leader admitted more than the plan's budget (report)
    └── StepError               a step could not run: the epoch is broken, a new one replays (retry in a new epoch)

Messages have the value, the rule and the fix.
"""


class RuntimeFaultError(Exception):
    """The root: caught at the edge of a process."""


class InputError(RuntimeFaultError):
    """The caller gave something that cannot work."""


class RequestRefusedError(InputError):
    """One request cannot be served."""


class PoolExhaustedError(RuntimeFaultError):
    """No free pages are left in this slot."""


class StepError(RuntimeFaultError):
    """A frame does not continue the steps before it, or its computation failed."""
