"""`python -m streamrl.cli` is `streamrl`."""

import sys

from streamrl.cli.main import main

sys.exit(main())
