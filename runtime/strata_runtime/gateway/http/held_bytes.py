"""Counts the bytes of all request bodies that are being read, so that many slow clients do not add up. Used by `app`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata_runtime.gateway.errors import UnavailableError


class HeldBytes:
    """What is held counts, not what is announced: a client that sends nothing takes nothing from others."""

    def __init__(self) -> None:
        self._held = 0

    @contextmanager
    def share(self, most: int) -> Iterator[Callable[[int], None]]:
        """One body: yields what counts further bytes of it (raises UnavailableError beyond `most` of all); gives them back."""
        own = 0

        def hold(count: int) -> None:
            nonlocal own
            if self._held + count > most:
                raise UnavailableError(
                    f"the bodies that this server is reading hold {self._held} bytes, {count} more are above the {most} of "
                    "all together (--max-held-body-bytes): send this request again later"
                )
            self._held += count
            own += count

        try:
            yield hold
        finally:
            self._held -= own
