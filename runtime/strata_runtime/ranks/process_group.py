"""Collectives of ranks by torch.distributed: NCCL between GPUs, Gloo between processors. The same code runs both; which one, the device says.

Ranks find each other by a file in memory that the first one hands the others with their sockets: nobody else can open it, and it ends with them. The group is
made by itself, not as torch's one of the process: a slot may lead several stages, and each epoch may have ranks of its own. All stay on loopback.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from strata_runtime.ranks import collectives
from strata_runtime.ranks.collectives import RankLostError

JOIN_SECONDS = 10.0  # until all have found each other: milliseconds, once all have loaded their parts
# On GPUs calls come back at once, and what is waited for is a whole step, in whose first one ranks make their kernels.
GPU_PATIENCE_SECONDS = 20.0
_LOOK_SECONDS = 2e-5  # between two looks at whether a GPU has computed a step
_LOOPBACK = "127.0.0.1"
# What NCCL's threads of torch would do with a collective that does not end: to end the slot's process. `finish` looks after that.
_NCCL_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def make_meeting() -> int:
    """The descriptor of a file by which ranks find each other: memory that ends with the last process that has it."""
    return os.memfd_create("strata-ranks-meet", os.MFD_CLOEXEC)


class ProcessGroup:
    """One rank's end: see `Collectives`. Sums are made in the type of what is added up, the same bits on every rank."""

    shared_bytes = 0

    def __init__(
        self, meeting: int, rank: int, ranks: int, device: torch.device, patience: float | None = None
    ) -> None:
        """meeting: the file's descriptor, which may be closed afterwards."""
        self.rank, self.ranks = rank, ranks
        self._device = device
        usual = collectives.PATIENCE_SECONDS if device.type == "cpu" else GPU_PATIENCE_SECONDS
        self._patience = usual if patience is None else patience
        # Never closed: torch's store opens it by its number once more when it goes, whenever that is, and ends the process where that fails.
        self._meeting = os.dup(meeting)
        self._ended = threading.Event()
        self._group: Any = None  # of torch.distributed: its two have no type in common

    def join(self) -> None:
        """Raises RankLostError where a rank does not come, or the ranks are ended meanwhile."""
        joined = threading.Event()
        failed: list[Exception] = []

        def meet() -> None:
            try:
                self._group = self._made()
            except Exception as error:  # noqa: BLE001  torch has several
                failed.append(error)
            finally:
                joined.set()

        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # Nothing that waits there can be let go: it ends by its own limit, and before the interpreter does, whose lock it then asks for.
        threading.Thread(target=meet, name=f"rank {self.rank} joins").start()
        self._wait(joined.is_set, 2 * JOIN_SECONDS, 1e-3)
        if failed:
            raise RankLostError(
                f"{self._name}: not all ranks of this stage have joined: {_first_line(failed[0])}"
            ) from failed[0]
        self.all_reduce(torch.zeros(1, device=self._device))  # NCCL connects with the first one
        self.finish()

    def all_reduce(self, items: Tensor) -> None:
        if items.numel():
            self._do(lambda group: group.allreduce([items]))

    def gather(self, items: Tensor, widths: tuple[int, ...]) -> Tensor:
        rows, widest = items.shape[0], max(widths)
        if not rows:
            return items.new_empty(0, sum(widths))
        own = items if items.shape[1] == widest else torch.nn.functional.pad(items, (0, widest - items.shape[1]))
        parts = [items.new_empty(rows, widest) for _ in widths]
        self._do(lambda group: group.allgather([parts], [own.contiguous()]))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def finish(self) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            self._wait(done.query, self._patience, _LOOK_SECONDS)

    def end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        # Gloo's waits end with the sockets of the others, whose processes whoever ends a stage ends.
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()

    def _do(self, call: Callable[[Any], Any]) -> None:
        if self._ended.is_set():
            raise RankLostError(f"{self._name}: the ranks of this stage were ended")
        assert self._group is not None, "a collective before the ranks have joined"
        try:
            call(self._group).wait()
        except RuntimeError as error:
            raise RankLostError(
                f"{self._name}: a collective failed, as another rank hangs, or died: {_first_line(error)}"
            ) from error

    def _wait(self, done: Callable[[], bool], seconds: float, look: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            if self._ended.is_set():
                break
            if time.monotonic() > end:
                self.end()
                raise RankLostError(
                    f"{self._name}: what ranks compute together took over {seconds:g} s: one hangs, or died"
                )
            time.sleep(look)
        if self._ended.is_set():
            raise RankLostError(f"{self._name}: the ranks of this stage were ended")

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    def _made(self) -> Any:
        torch_distributed: Any = torch.distributed  # which tells mypy half of what it has
        store = torch_distributed.FileStore(f"/proc/self/fd/{self._meeting}", self.ranks)
        limit = timedelta(seconds=JOIN_SECONDS)
        store.set_timeout(limit)
        if self._device.type == "cuda":
            for name, value in _NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            nccl = torch_distributed.ProcessGroupNCCL.Options()
            nccl._timeout = limit  # noqa: SLF001  torch has no other name for it
            return torch_distributed.ProcessGroupNCCL(store, self.rank, self.ranks, nccl)
        gloo = torch_distributed.ProcessGroupGloo._Options()  # noqa: SLF001
        gloo._devices = [torch_distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
        gloo._timeout = limit  # noqa: SLF001
        group = torch_distributed.ProcessGroupGloo(store, self.rank, self.ranks, gloo)
        group.set_timeout(timedelta(seconds=self._patience))
        return group


def _first_line(error: Exception) -> str:
    """Of what torch says, which adds advice and where in its code that was."""
    return str(error).partition("\n")[0].partition(". ")[0].rpartition("] ")[2]
