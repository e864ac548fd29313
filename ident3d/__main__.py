"""`python -m ident3d`: the command line."""

from ident3d.cli import main

if __name__ == "__main__":
    main()
