"""A ring that ends a poll: how other threads wake the control loop of a slot, or who gives pages."""

import socket as sockets
import threading


class Wakeup:
    """Lets any thread wake the one that polls `reader`, also when that has ended."""

    def __init__(self) -> None:
        self.reader, self._writer = sockets.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._open = threading.Lock()  # held while the writer is used or closed

    def ring(self) -> None:
        with self._open:
            if self._writer.fileno() < 0:
                return  # closed: nobody is to be woken
            try:
                self._writer.send(b"\0")
            except BlockingIOError:
                return  # it is ringing already

    def clear(self) -> None:
        try:
            self.reader.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._open:
            self.reader.close()
            self._writer.close()
