"""`python -m rollkv`, and the console script: an interrupt while Python is still importing ends without a traceback too."""

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from rollkv.cli.main import run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
