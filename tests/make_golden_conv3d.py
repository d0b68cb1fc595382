"""Write tests/golden/conv3d.npz from PyTorch.

    python tests/make_golden_conv3d.py

Needs torch. The tests read the file in every lane, and in the one with torch make its
contents anew and compare.
"""

import numpy as np
from conv3d_cases import CASES, GOLDEN, pack, reference


def main() -> None:
    packed = pack({case.name: reference(case) for case in CASES.values()})
    np.savez_compressed(GOLDEN, **packed)
    print(f"{GOLDEN.name}: {len(CASES)} cases, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
