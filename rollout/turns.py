"""A lock that is given in the order it was asked for: a handoff is not starved by clients that ask again at once."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Turns:
    """`with turns:` waits for its turn. Not to be entered twice by one thread."""

    def __init__(self) -> None:
        self._changed, self._queue = threading.Condition(), deque[object]()

    def __enter__(self) -> None:
        mine = object()
        with self._changed:
            self._queue.append(mine)
            try:
                self._changed.wait_for(lambda: self._queue[0] is mine)
            except BaseException:  # an interrupt must not leave a ticket that nobody holds
                self._queue.remove(mine)
                self._changed.notify_all()
                raise

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()
