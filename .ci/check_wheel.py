"""Checks that a wheel holds each tracked file of the three packages, and no other.

Usage: python check_wheel.py WHEEL, from the root of the checkout.
"""

import subprocess
import sys
import zipfile

PACKAGES = ("jaxops", "models", "train")


def main(wheel: str) -> None:
    """Exit with a message that names what is missing or too much."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], capture_output=True, text=True, check=True
    )
    tracked = set(filter(None, listing.stdout.split("\0")))
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    if packed != tracked:
        sys.exit(
            f"{wheel}: missing {sorted(tracked - packed)}, "
            f"too much {sorted(packed - tracked)}"
        )
    print(f"the wheel holds the {len(packed)} tracked files of {', '.join(PACKAGES)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
