"""`python -m tdcopier.bench`: the old name of `python -m tdcopier bench`, for one release."""

import sys

from tdcopier._commands.bench import main

if __name__ == "__main__":
    sys.exit(main())
