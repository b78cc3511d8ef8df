"""`python -m jppo`."""

import os
import sys

# Python put the current directory first on the path, where its files would hide installed packages. Keep it only in a
# checkout that is not installed, because jppo itself is there.
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from jppo.cli.main import main

sys.exit(main())
