"""Entry point of `python -m streamrl.cli`, the same program as the command `streamrl`."""

import sys

from streamrl.cli.main import main

sys.exit(main())
