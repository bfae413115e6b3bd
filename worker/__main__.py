"""Entry point of the worker process: `python -m cearx.worker`, started by the supervisor only."""

import sys

from cearx.worker.process import main

if __name__ == "__main__":
    sys.exit(main())
