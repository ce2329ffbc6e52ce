"""`python -m qwenref` is the command line."""

import sys

from qwenref.cli import main

sys.exit(main())
