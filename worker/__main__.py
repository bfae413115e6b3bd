"""`python -m cearx.worker`: the worker process, started by the supervisor.

Owns what must be set before torch is imported, and nothing else.
"""

import os
import sys

SPIN_COUNT = "2000"
"""How often torch's threads (GNU OpenMP) look for work before they sleep: some 100 us, enough for
the next operation of a step to find them awake. With the default, some milliseconds, they keep the
cores from the processes beside, and the steps of a busy machine take up to ten times as long."""


def run() -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from cearx.worker.process import main  # imports torch, which reads the environment

    return main()


if __name__ == "__main__":
    sys.exit(run())
