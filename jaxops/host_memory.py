"""Host memory that is kept from one call of a program to the next (Linux, glibc).

XLA asks for a program's temporaries anew at each call. glibc takes large blocks
straight from the kernel and gives them straight back, so each call touches fresh pages,
and the page faults can cost as much as the arithmetic: training steps of an FNO on 2
CPU cores took 1.3 to 1.8 times as long.

Keeping the pages costs resident size: nothing that was freed goes back to the system.
Where a freed block serves the next call, the size stays at the largest sum of
temporaries. It does not always fit again; then the next call takes a new one, and the
old one stays resident. Seen, differing from run to run: in training steps whose
temporaries take 148, 291 and 1173 MB the peak grew by 170 to 620, 325 to 610 and 4850
MB. No bound is known. Where memory is short, set ``JAXOPS_KEEP_MEMORY=0``.
"""

import ctypes
import os
import platform

SWITCH = "JAXOPS_KEEP_MEMORY"  # "0" leaves glibc as it is

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; returns whether it did.

    Works for threads that start later, so it is called before a backend starts. Does
    nothing on other systems, where the environment has ``JAXOPS_KEEP_MEMORY=0``, or
    where it tunes malloc already.
    """
    is_glibc = platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
    is_tuned = any(name.startswith("MALLOC_") for name in os.environ)
    is_tuned |= "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_glibc or is_tuned or os.environ.get(SWITCH) == "0":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_M_ARENA_MAX, 1),  # one heap, so that every thread finds the kept pages
        (_M_MMAP_MAX, 0),  # large blocks from the heap too
        (_M_TRIM_THRESHOLD, -1),  # never give its top back: the largest size_t
        (_M_TOP_PAD, 512 * 2**20),  # grow it in large steps: untouched, they are free
    )
    return all([mallopt(*setting) == 1 for setting in settings])
