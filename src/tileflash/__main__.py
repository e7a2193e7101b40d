"""`python -m tileflash` is the `tileflash` command."""

from tileflash.cli import main

if __name__ == "__main__":
    main()
