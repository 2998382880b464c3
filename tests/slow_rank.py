"""Runs train.py with a local rank 0 that prepares data slowly, and a short limit on every collective.

accelerate launch --config_file FILE tests/slow_rank.py SLOW_SECONDS LIMIT_SECONDS ARGUMENTS OF train.py
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
from finetune.quiet import silence


def main(slow_seconds: float, limit_seconds: float, arguments: list[str]) -> None:
    silence()
    import train
    from finetune import corpus, distributed

    is_slow = os.environ["LOCAL_RANK"] == "0"
    prepare, make_part, collect = corpus.prepare, corpus._Maker._make_part, corpus._Maker._collect

    def prepare_second(*job):
        time.sleep(0.0 if is_slow else 1.5)  # so that the slow rank is the one that prepares
        return prepare(*job)

    def slowly(method):
        def wait(self, *arguments):
            if is_slow:
                print(f"{method.__name__} takes long", flush=True)
                time.sleep(slow_seconds)
            return method(self, *arguments)

        return wait

    def find_second(self, place, find=corpus.Corpus._find):
        time.sleep(0.0 if is_slow else 0.2)
        return find(self, place)

    with (
        mock.patch.object(corpus, "prepare", prepare_second),
        mock.patch.object(corpus._Maker, "_make_part", slowly(make_part)),
        mock.patch.object(corpus._Maker, "_collect", slowly(collect)),
        mock.patch.object(corpus.Corpus, "_find", find_second),
        mock.patch.object(
            distributed, "InitProcessGroupKwargs", partial(distributed.InitProcessGroupKwargs, timeout=timedelta(seconds=limit_seconds))
        ),
    ):
        train.train(*train.check(arguments))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
