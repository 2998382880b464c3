"""A mistake of the person who reads the message: what, where, fix. Raised together, printed once, exit code 2."""

import contextlib
import difflib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

EXIT_CODE = 2
# torch elastic ends every rank as soon as one of them has failed. A rank other than local rank 0 therefore waits before it
# fails: rank 0, which makes the same mistake at the same time, is the one that speaks.
WAIT_FOR_RANK_0_SECONDS = 60.0


@dataclass(frozen=True)
class Mistake:
    """One line for the reader: the file, the key in it, what is wrong there, and what to do."""

    file: str
    key: str
    what: str
    fix: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.what, self.fix) if part)


def near_path(path: Path, otherwise: str) -> str:
    """The fix for a path that is not there: its nearest neighbour. The first part that does not exist is compared."""
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    neighbours = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    near = difflib.get_close_matches(missing.name, neighbours, n=1)
    return f"did you mean {missing.parent / near[0]}?" if near else otherwise


class Mistakes(Exception):
    """Every mistake that was found, so that none has to be met in a second run.

    Args:
        mistakes: at least one.
    """

    def __init__(self, *mistakes: Mistake):
        super().__init__("\n".join(str(mistake) for mistake in mistakes))
        self.mistakes = list(mistakes)


@contextlib.contextmanager
def file_errors_are_mistakes() -> Iterator[None]:
    """For what looks at files that the user named: one that cannot be reached is theirs to mend."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        what = error.strerror or str(error)
        raise Mistakes(Mistake(os.fsdecode(error.filename), "", what, "correct the path or its permissions")) from None


def exit_with(error: Mistakes) -> NoReturn:
    """Print the mistakes from local rank 0 alone, without a traceback, and end this process with exit code 2.

    Another rank waits, since rank 0's end takes it down too. If it is still there afterwards, the mistake was its own.
    """
    local_rank, prefix = os.environ.get("LOCAL_RANK", "0"), ""
    if local_rank.isdigit() and local_rank != "0":
        time.sleep(WAIT_FOR_RANK_0_SECONDS)
        prefix = f"rank {os.environ.get('RANK', local_rank)}: "
    for mistake in error.mistakes:
        print(f"error: {prefix}{mistake}", file=sys.stderr)
    sys.stderr.flush()
    # os._exit: a half-initialised process group must not turn the clean exit into a hang.
    os._exit(EXIT_CODE) if "RANK" in os.environ else sys.exit(EXIT_CODE)
