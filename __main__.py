"""`python -m dflash_cache` is the same as the command `dflash`."""

from .cli import main

if __name__ == "__main__":
    main()
