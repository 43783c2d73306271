"""The commands, each a file or folder with a function `main`."""
