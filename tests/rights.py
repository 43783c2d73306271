"""The rights of a user other than root."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

#: Linux' rights to pass over the permissions of files, and to delete the files of others.
DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER = 1, 2, 3


@contextlib.contextmanager
def of_a_user() -> Iterator[None]:
    """Take root's rights over files from this thread, and from those that it starts. Other
    users do not have them.
    """
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # third version, this thread
    rights = (ctypes.c_uint32 * 6)()  # the first number has those in effect
    assert libc.capget(header, rights) == 0
    before = rights[0]
    rights[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH | 1 << FOWNER)
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        libc.capset(header, rights)
