"""The files of a run: each is read and written here."""
