"""`python -m rollkv`, and the console script: an interrupt while Python is still importing ends without a traceback too."""

import sys

from rollkv.errors import Interrupted


def main() -> None:
    """Entry point of the console script."""
    try:
        from rollkv.cli.main import run
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    run()


if __name__ == "__main__":
    main()
