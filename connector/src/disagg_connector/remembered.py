"""The latest names of something that is over, so that what comes twice or too late is known. Pure."""

from __future__ import annotations

from collections import OrderedDict


class Remembered:
    """A set of names that forgets the oldest beyond `limit`."""

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> bool:
        """Whether it was not known. A name that is added again is as young as a new one."""
        is_new = name not in self._names
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._limit:
            self._names.popitem(last=False)
        return is_new
