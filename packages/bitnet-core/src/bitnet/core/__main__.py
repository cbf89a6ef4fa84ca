"""``python -m bitnet.core``, and where the ``bitnet`` script begins.

The command line takes a tenth of a second to import; Ctrl-C ends that as quietly as it ends the rest.
"""

import sys


def main() -> int:
    """The ``bitnet`` command; returns the exit status."""
    try:
        from bitnet.core import cli

        return cli.main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # cli.INTERRUPTED, which may not be there yet


if __name__ == "__main__":
    sys.exit(main())
