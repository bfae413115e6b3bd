"""`python -m cearx.core`: the core process, started by the supervisor."""

import sys

from cearx.core.process import main

sys.exit(main())
