"""`python -m diamond.server`."""

import sys

from diamond.server.main import main

sys.exit(main())
