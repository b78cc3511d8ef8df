"""`python -m jppo`."""

import sys

from jppo.cli import main

sys.exit(main())
