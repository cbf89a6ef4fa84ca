"""Entry point of ``python -m bitnet.core`` and of the ``bitnet`` script.

Importing the command line takes a tenth of a second; Ctrl-C during the import ends the program as quietly as later.
"""

import sys


def main() -> int:
    """The ``bitnet`` command; returns the exit status."""
    try:
        from bitnet.core import cli

        return cli.main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # cli.INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())
