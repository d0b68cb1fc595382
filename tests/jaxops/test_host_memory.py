"""Freed memory is kept: counted page faults, in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

from jaxops import host_memory

# Allocates and frees 64 MB, touched, many times, and prints the page faults it took.
PROGRAM = """
import resource
import numpy as np
from jaxops import host_memory
print(host_memory.keep_freed_memory())
np.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# The same with one page in 25 MB of a block of 2.5 GB, which is more than an int holds.
LARGE = """
import ctypes
import resource
from jaxops import host_memory
print(host_memory.keep_freed_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(2_500_000_000)
    assert block, "no address space"
    for page in range(100):
        ctypes.memset(block + page * 25_000_000, 1, 1)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(program: str = PROGRAM, **environment: str) -> tuple[str, int]:
    untuned = {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    for name in ("GLIBC_TUNABLES", host_memory.SWITCH):  # a test before may set it
        untuned.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**untuned, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.system() != "Linux", reason="mallopt is glibc's")
def test_kept_memory_takes_no_page_faults_again():
    kept, few = faults()
    left, many = faults(**{host_memory.SWITCH: "0"})
    assert (kept, left) == ("True", "False")
    # Each of the 20 blocks faults at least once per huge page of 2 MB when it is mapped
    # anew: 640 in all, and 16384 a block with small pages.
    assert few < 100 < 640 <= many


@pytest.mark.skipif(platform.system() != "Linux", reason="mallopt is glibc's")
def test_the_top_is_kept_beyond_two_gigabytes():
    assert faults(LARGE)[1] < 50
    assert faults(LARGE, **{host_memory.SWITCH: "0"})[1] >= 100


@pytest.mark.skipif(platform.system() != "Linux", reason="mallopt is glibc's")
def test_a_user_who_tunes_malloc_is_left_alone():
    assert faults(MALLOC_ARENA_MAX="2")[0] == "False"
    assert faults(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[0] == "False"
