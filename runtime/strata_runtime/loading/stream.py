"""Work ahead in one other thread, a few results deep: what lets reading overlap with quantizing in bounded memory.

Called by `load_stage`. Knows nothing of weights.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def ahead(tasks: Iterable[Callable[[], T]], depth: int = 1) -> Generator[T]:
    """The results of `tasks` in order. While the caller works on one, the next `depth` are made; never more exist.

    What a task raises is raised here, in its turn. When the caller stops early, tasks that have not begun never run, and the one under
    way is waited for.
    """
    left = iter(tasks)
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        waiting: deque[Future[T]] = deque(pool.submit(task) for task in islice(left, depth))

        def take() -> T:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(task) for task in islice(left, 1))
            return result

        try:
            while waiting:
                yield take()  # no name here keeps a result that the caller has let go
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
