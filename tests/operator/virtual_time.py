"""An event loop whose time passes only while everybody waits: hours of a controller's life in milliseconds, always the same."""

import asyncio
import selectors


class _NobodyElse(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Nothing comes from outside: where a loop would wait, its time is set forward."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and for nothing that could come"
        self.seconds += max(0.0, timeout)
        return []


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._nobody = _NobodyElse()
        super().__init__(self._nobody)

    def time(self) -> float:
        return self._nobody.seconds

    def passes(self, seconds: float) -> None:
        """Time does, for everybody who waits. 0.01: whatever can be done now is done."""
        self.run_until_complete(asyncio.sleep(seconds))
