"""Running programs and waiting for conditions."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from e2e.cluster.errors import CommandError, WaitTimeoutError

Result = TypeVar("Result")
Word = str | Path
"""One word of a command line."""
STILL_RUNNING = 124
"""The status of a program that did not end in time, as `timeout` gives it."""


@dataclass(frozen=True)
class Answer:
    """What a program said."""

    code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


def answer_of(
    argv: Sequence[Word],
    doing: str,
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
) -> Answer:
    """Run a program to its end; that it fails is an answer too.

    `doing` says what it is for and starts the error's text; `env` is added to ours.

    Raises:
        CommandError: it is missing, or did not end within `timeout` seconds.
    """
    command = [str(word) for word in argv]
    try:
        ended = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            env={**os.environ, **env} if env else None,
            cwd=cwd,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(doing, command, 127, str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            doing, command, STILL_RUNNING, f"it was still running after {timeout:.0f} s"
        ) from error
    return Answer(ended.returncode, ended.stdout, ended.stderr)


def output(answer: Answer, argv: Sequence[Word], doing: str) -> str:
    """What a program wrote to standard output.

    Raises:
        CommandError: it failed.
    """
    if not answer.ok:
        raise CommandError(doing, [str(word) for word in argv], answer.code, answer.stdout + answer.stderr)
    return answer.stdout


def run(
    argv: Sequence[Word],
    doing: str,
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
) -> str:
    """As `answer_of`, and return what it wrote to standard output.

    Raises:
        CommandError: it is missing, failed, or did not end within `timeout` seconds.
    """
    return output(answer_of(argv, doing, stdin=stdin, env=env, cwd=cwd, timeout=timeout), argv, doing)


def in_netns(name: str, argv: Sequence[Word]) -> list[str]:
    """`argv` as a command that runs in a named network namespace.

    Not `ip netns exec`: that remounts /sys, and the control group mounts below it vanish.
    """
    return ["nsenter", f"--net=/run/netns/{name}", "--", *(str(word) for word in argv)]


def wait_until(
    check: Callable[[], Result | None],
    what: str,
    *,
    limit: float,
    every: float = 0.1,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Call `check` until it returns something true and return that. The last call begins when the limit has passed.

    Raises:
        WaitTimeoutError: it did not within `limit` seconds; the message names `what`.
    """
    deadline = clock() + limit
    while True:
        is_last = clock() >= deadline
        result = check()
        if result:
            return result
        if is_last:
            raise WaitTimeoutError(f"Waited {limit:.0f} s for {what}, in vain.")
        sleep(every)
