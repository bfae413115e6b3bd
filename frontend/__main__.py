"""`python -m cearx.frontend`: started by the supervisor, never by hand."""

import sys

from cearx.frontend.process import main

if __name__ == "__main__":
    sys.exit(main())
