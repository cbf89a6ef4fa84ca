"""``python -m bitnet.core``: the ``bitnet`` command."""

import sys

from bitnet.core.cli import main

sys.exit(main())
