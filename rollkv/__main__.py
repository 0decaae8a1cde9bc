"""`python -m rollkv` is the command `rollkv`."""

from rollkv.cli.main import run

if __name__ == "__main__":
    run()
