"""`python -m training COMMAND ...` in a checkout, as `keras-preact COMMAND ...` where it is installed."""

from .console import main

if __name__ == "__main__":
    main()
