"""Progress for people: a spinner on a terminal, plain lines in a log."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_HEARTBEAT_SECONDS = 30.0


class Progress:
    """Prints what is being done and how long it took; safe to use from several threads."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        """Print one line."""
        self.console.print(line, markup=False)

    def done(self, what: str, since: float) -> None:
        """Print that `what` is done, how long it took since `since` (monotonic) and since the start of all."""
        now = time.monotonic()
        self.say(f"  {what:<44} {now - since:6.1f} s   (at {now - self._began:.1f} s)")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A short step: one line when it is done, none when it fails (the error says it then)."""
        began = time.monotonic()
        yield
        self.done(what, began)

    @contextmanager
    def long_step(self, what: str) -> Iterator[None]:
        """A step of minutes: a spinner with the seconds on a terminal, else a line every half minute."""
        began = time.monotonic()
        over = threading.Event()
        terminal = self.console.is_terminal

        def tick() -> None:
            with self.console.status(what) if terminal else _silent() as status:
                while not over.wait(1.0 if terminal else _HEARTBEAT_SECONDS):
                    line = f"  {what}: {time.monotonic() - began:.0f} s so far"
                    if status is None:
                        self.say(line)
                    else:
                        status.update(line)

        if not terminal:
            self.say(f"  {what} ...")
        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join()
        self.done(what, began)


@contextmanager
def _silent() -> Iterator[None]:
    yield None
