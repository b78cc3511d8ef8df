"""`python -m jppo`."""

import sys

from jppo.cli.main import main

sys.exit(main())
