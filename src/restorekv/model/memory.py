"""Returns freed memory to the system: glibc would keep up to a whole full cache of it for later."""

import contextlib
import ctypes


def trim_heap() -> None:
    """Trims the C library's heap if it is glibc; PyTorch's allocators for other devices are not affected."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
