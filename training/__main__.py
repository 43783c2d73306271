"""`keras-preact` as a module, for a checkout that is not installed: `python -m
training`.
"""

from .cli.console import main

if __name__ == "__main__":
    main()
