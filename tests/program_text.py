"""What a lowered program must not contain, read from its StableHLO text."""

import re

_CONVOLUTION = re.compile(r"stablehlo\.convolution\(.*")
_TENSOR = re.compile(r"tensor<([^>]*)>")
# Ops that volumes could be made of, and that no Apple plugin has, or has wrong.
_ABSENT = ("reduce_window", "select_and_scatter", "gather", "scatter", "custom_call")
_ABSENT += ("dynamic_slice", "dynamic_update_slice")
_UNIT_COUNTS = ("batch_group_count = 1 ", "feature_group_count = 1 ")


def convolutions(text: str) -> list[str]:
    return _CONVOLUTION.findall(text)


def faults(text: str) -> list[str]:
    """Lines with a convolution that is not plain and 2D, or with an absent op.

    Plain: no groups, and no zeros between the points of the image, as transposed
    convolutions and gradients of strided ones have. Nor does padding put any there.
    """
    found = []
    for line in convolutions(text):
        signature = line.rpartition(" : ")[2]
        ranks = {dims.count("x") for dims in _TENSOR.findall(signature)}
        plain = all(count in line for count in _UNIT_COUNTS)
        spread = re.search(r"lhs_dilate = \[(?!1, 1\])", line)
        if ranks != {4} or not plain or spread:
            found.append(line)
    found += re.findall(r".*interior = \[[\d, ]*[1-9].*", text)
    ops = r"stablehlo\.(?:dynamic_)?(?:" + "|".join(_ABSENT) + r")\b.*"
    return found + re.findall(ops, text) + re.findall(r".*xf64.*|.*complex<.*", text)
