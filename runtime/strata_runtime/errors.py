"""What the runtime raises, by what the caller should do next.

    RuntimeFaultError
    ├── InputError              fix the request, checkpoint or role; retrying does not help
    │   └── RequestRefusedError one request can never run here; the others go on
    ├── StepError               a step could not run: the epoch is broken, a new one replays (retry in a new epoch)
    └── SupersededError         nobody wants what is being prepared any more: leave what is whole, and end

Messages have the value, the rule and the fix. `reason_of` makes one of whatever else was raised, for a status.
"""

from strata_planner.contract.values import ContractError

_LONGEST_REASON = 4000


class RuntimeFaultError(Exception):
    """The root: caught at the edge of a process."""


class InputError(RuntimeFaultError):
    """The caller gave something that cannot work."""


class RequestRefusedError(InputError):
    """One request cannot be served."""


class StepError(RuntimeFaultError):
    """A frame does not continue the steps before it, or its computation failed."""


class SupersededError(RuntimeFaultError):
    """A higher epoch has no use for what is being loaded."""


def reason_of(error: BaseException) -> str:
    """What a status says of it: our own errors and the system's speak for themselves, any other is named by its type. Never raises, can always be sent."""
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  not even that can be asked of it
        said = ""
    speaks = isinstance(error, RuntimeFaultError | ContractError | OSError) and said
    text = said if speaks else f"{kind}: {said}" if said else kind
    return text.encode("utf-8", "backslashreplace").decode()[:_LONGEST_REASON]
