"""`python -m legato` is the `legato` command."""

from legato.cli import main

if __name__ == "__main__":
    main()
