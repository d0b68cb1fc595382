"""Metadata of ImageJ and OME: read, and written so that both show the right size.

ImageJ: lines of key=value in the ImageDescription of the first page, `spacing` and
`unit` among them; pixels per unit in XResolution and YResolution; the origin as the
pixel coordinate of position 0 (`xorigin`). OME: XML there, with PhysicalSizeX and
PositionX of each plane (www.openmicroscopy.org/Schemas/OME/2016-06).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any
from xml.etree import ElementTree

import numpy as np
import tifffile

from train.data.tiff_geometry import Calibration, convert_length, ome_unit

X_RESOLUTION, Y_RESOLUTION, RESOLUTION_UNIT = 282, 283, 296
RESOLUTION_UNITS = {2: "inch", 3: "cm"}
# Programs that know no size write 72 dots an inch; ImageJ ignores it as well.
NO_SIZE = (1 / 72, "inch")
LARGEST = 2**32 - 1  # of the two integers of a TIFF's rational number

PROVENANCE_KEY = "jaxops_provenance"  # ImageJ ignores keys that it doesn't know
PROVENANCE_NAMESPACE = "jaxops/provenance"  # OME readers ignore foreign annotations

UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, PROVENANCE_NAMESPACE)

# What ImageJ knows of display, time and density, and an enlarged volume keeps.
KEPT_KEYS = ("loop", "finterval", "fps", "tunit", "cf", "vunit", "c0", "c1", "c2")
KEPT_KEYS += ("c3", "c4", "min", "max")
KEPT_BLOCKS = ("Info", "Properties")
# These count channels, and are kept where their number stays.
KEPT_CHANNEL_KEYS = ("mode",)
KEPT_CHANNEL_BLOCKS = ("LUTs",)


def tag_calibration(metadata: Mapping[str, Any], tags: Any) -> Calibration:
    """Voxel size, unit and origin of an ImageJ file or of one without metadata.

    - metadata: of the ImageDescription, by key; empty if there is none.
    - tags: of the first page, as tifffile.TiffPage.tags.

    A resolution of 1 or of 72 dots an inch, without spacing, unit or origin, says
    nothing. Where some size is known, those that aren't are 1 in the plane, as ImageJ
    takes them, and unknown along Z.
    """
    y, x = _pixel_size(tags, Y_RESOLUTION), _pixel_size(tags, X_RESOLUTION)
    unit = metadata.get("unit")
    unit = _unescape(str(unit)) if unit is not None else None
    if unit is None and RESOLUTION_UNIT in tags:
        unit = RESOLUTION_UNITS.get(tags[RESOLUTION_UNIT].value)
        if (x, unit) == NO_SIZE:
            y, x, unit = 1.0, 1.0, None
    y = _in_unit(y, metadata.get("yunit"), unit)
    z = metadata.get("spacing")
    z = _in_unit(abs(z), metadata.get("zunit"), unit) if _is_number(z) and z else None
    origins = [metadata.get(key) for key in ("zorigin", "yorigin", "xorigin")]
    known = any(map(_is_number, origins)) or z is not None
    if not known and ome_unit(unit) == "pixel" and {y, x} <= {None, 1.0}:
        return Calibration()
    sizes = (z, y or 1.0, x or 1.0)
    origin = None
    if any(map(_is_number, origins)):
        origin = tuple(
            -o * (size or 1.0) if _is_number(o) and o else 0.0
            for o, size in zip(origins, sizes, strict=True)
        )
    return Calibration(sizes, unit or None, origin)


def _pixel_size(tags, code):
    value = tags[code].value if code in tags else None
    if not isinstance(value, tuple) or len(value) != 2 or min(value) <= 0:
        return None
    return value[1] / value[0]


def _in_unit(size, unit, target):
    if size is None or unit is None:
        return size
    return convert_length(size, _unescape(str(unit)), target)


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unescape(text):
    """ImageJ writes letters beyond ASCII as Java does: \\u00B5m."""
    if "\\u" not in text:
        return text.strip()
    return text.encode("ascii", "backslashreplace").decode("unicode_escape").strip()


def _escape(text):
    return "".join(c if c.isascii() else f"\\u{ord(c):04X}" for c in text)


def read_ome(xml: str, index: int) -> tuple[Calibration, dict[str, Any]]:
    """Calibration of an image in OME-XML, and what else of it should be kept.

    The unit is that of X; sizes and positions in other units are converted, and those
    that can't be are unknown. Positions in OME's 'reference frame', which names no
    unit, are taken to be in the unit of the sizes.
    """
    images = _children(_parse(xml), "Image")
    if index >= len(images):
        return Calibration(), {}
    pixels = _children(images[index], "Pixels")[0]
    units = {
        axis: pixels.get(f"PhysicalSize{axis}Unit", "µm")
        for axis in "XYZ"
        if _number(pixels.get(f"PhysicalSize{axis}"))
    }
    unit = next(iter(units.values()), None)
    sizes = tuple(
        convert_length(abs(_number(pixels.get(f"PhysicalSize{axis}"))), own, unit)
        if (own := units.get(axis))
        else None
        for axis in "ZYX"
    )
    kept = {
        key: pixels.get(key)
        for key in ("TimeIncrement", "TimeIncrementUnit")
        if key in pixels.attrib
    }
    if images[index].get("Name"):
        kept["Name"] = images[index].get("Name")
    channels = [
        {key: value for key, value in channel.attrib.items() if key != "ID"}
        for channel in _children(pixels, "Channel")
    ]
    if any(set(channel) - {"SamplesPerPixel"} for channel in channels):
        kept["Channel"] = channels
    origin = _ome_origin(pixels, unit)
    return Calibration(sizes if units else None, unit, origin), kept


def _ome_origin(pixels, unit):
    for plane in _children(pixels, "Plane"):
        if all(int(plane.get(f"The{axis}", 0)) == 0 for axis in "ZCT"):
            break
    else:
        return None
    if unit is None or not any(f"Position{axis}" in plane.attrib for axis in "XYZ"):
        return None  # a position without voxel sizes can't be put beside them
    origin = []
    for axis in "ZYX":
        value = _number(plane.get(f"Position{axis}")) or 0.0
        own = plane.get(f"Position{axis}Unit", "reference frame")
        if own != "reference frame":
            value = convert_length(value, own, unit)
        origin.append(value)
    return None if None in origin else tuple(origin)


def _number(text):
    try:
        return float(text)
    except (TypeError, ValueError):  # absent, or no number: unknown
        return None


def ome_files(xml: str) -> tuple[set[str], int]:
    """Names of the other files that OME-XML refers to, and its channels times times."""
    root = _parse(xml)
    names, planes = set(), 1
    for image in _children(root, "Image"):
        for pixels in _children(image, "Pixels"):
            size = int(pixels.get("SizeC", 1)) * int(pixels.get("SizeT", 1))
            planes = max(planes, size)
            for data in _children(pixels, "TiffData"):
                for other in _children(data, "UUID"):
                    if other.text != root.get("UUID") and other.get("FileName"):
                        names.add(other.get("FileName"))
    return names, planes


def _parse(xml):
    try:
        return ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"its OME metadata is no XML ({error})") from error


def _children(element, name):
    """Child elements of that name, in whichever version of OME's namespace."""
    return [child for child in element if child.tag.rpartition("}")[2] == name]


def read_provenance(
    metadata: Mapping[str, Any], xml: str | None
) -> dict[str, Any] | None:
    """The dictionary that `written_metadata` put into a file, or None."""
    text = metadata.get(PROVENANCE_KEY)
    if xml is not None:
        for group in _children(_parse(xml), "StructuredAnnotations"):
            for note in _children(group, "CommentAnnotation"):
                if note.get("Namespace") == PROVENANCE_NAMESPACE:
                    text = "".join(value.text or "" for value in note)
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except json.JSONDecodeError:  # another program changed it: it is information only
        return None
    return found if isinstance(found, dict) else None


def encode_provenance(provenance: Mapping[str, Any]) -> str:
    """One line of ASCII without "="; ValueError for what JSON has no word for."""
    try:
        text = json.dumps(dict(provenance), default=_plain)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"provenance must hold numbers, strings, lists and dicts only ({error})"
        ) from error
    # It can stand in strings only; some readers of key=value stumble over a second one.
    return text.replace("=", "\\u003d")


def _plain(value):
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"got a {type(value).__name__}")


def imagej_holds(calibration: Calibration) -> bool:
    """Whether a TIFF's rational numbers can hold the pixels a unit of length."""
    sizes = calibration.voxel_size or (None,) * 3
    return all(size is None or 1 / LARGEST <= size <= LARGEST for size in sizes[1:])


def imagej_arguments(
    sizes: Sequence[int],
    calibration: Calibration,
    kept: Mapping[str, Any],
    same_channels: bool,
    provenance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of tifffile.TiffWriter.write for the first page of an ImageJ stack.

    - sizes: of T, Z, C, Y, X, in ImageJ's order.
    - kept: metadata of the file that the volume was made from.
    """
    voxel_size = calibration.voxel_size or (None,) * 3
    keys = KEPT_KEYS + (KEPT_CHANNEL_KEYS if same_channels else ())
    entries = {key: kept[key] for key in keys if key in kept}
    if voxel_size[0] is not None:
        entries["spacing"] = voxel_size[0]
    if calibration.unit is not None:
        entries["unit"] = _escape(calibration.unit)
    if calibration.origin is not None:
        for axis, start, size in zip(
            "zyx", calibration.origin, voxel_size, strict=True
        ):
            entries[f"{axis}origin"] = -start / (size or 1.0) + 0.0
    if provenance is not None:
        entries[PROVENANCE_KEY] = encode_provenance(provenance)
    names = KEPT_BLOCKS + (KEPT_CHANNEL_BLOCKS if same_channels else ())
    blocks = {name: kept[name] for name in names if name in kept}
    text = tifffile.imagej_description(tuple(sizes), axes="TZCYX", rgb=False, **entries)
    return {
        "description": text.encode("ascii", "replace"),
        "resolution": tuple(_pixels_a_unit(size) for size in voxel_size[:0:-1]),
        "resolutionunit": 1,  # none: the unit has its word in the description
        "extratags": tifffile.imagej_metadata_tag(blocks, "<"),
    }


def _pixels_a_unit(size):
    """One over the size as (numerator, denominator), each of 32 bits."""
    if size is None:
        return (1, 1)
    exact = 1 / Fraction(size)
    near = exact.limit_denominator(min(LARGEST, int(LARGEST / max(exact, 1))))
    return near.numerator, near.denominator


def ome_arguments(
    sizes: Sequence[int],
    dtype: np.dtype,
    calibration: Calibration,
    kept: Mapping[str, Any],
    same_channels: bool,
    provenance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of tifffile.TiffWriter.write for the first page of an OME-TIFF.

    - sizes: of T, C, Z, Y, X, the order of the pages.
    - kept: metadata of the file that the volume was made from.
    - provenance: its "key", if it has one, settles the document's UUID.
    """
    num_times, num_channels, depth, height, width = sizes
    num_planes = num_times * num_channels * depth
    metadata = {key: value for key, value in kept.items() if key != "Channel"}
    if same_channels and "Channel" in kept:
        metadata["Channel"] = kept["Channel"]
    voxel_size = calibration.voxel_size or (None,) * 3
    for axis, size in zip("ZYX", voxel_size, strict=True):
        if size is not None:
            metadata[f"PhysicalSize{axis}"] = size
            metadata[f"PhysicalSize{axis}Unit"] = ome_unit(calibration.unit)
    if calibration.origin is not None:
        z, y, x = calibration.origin
        unit = ome_unit(calibration.unit)
        step = voxel_size[0] or 0.0
        heights = [z + step * (i % depth) for i in range(num_planes)]
        metadata["Plane"] = {
            "PositionX": [x] * num_planes,
            "PositionXUnit": [unit] * num_planes,
            "PositionY": [y] * num_planes,
            "PositionYUnit": [unit] * num_planes,
            "PositionZ": heights,
            "PositionZUnit": [unit] * num_planes,
        }
    if provenance is not None:
        metadata["CommentAnnotation"] = {
            "Namespace": PROVENANCE_NAMESPACE,
            "Value": encode_provenance(provenance),
        }
    document = {"Creator": "jaxops"}
    if provenance is not None and "key" in provenance:
        # What is made in the same way is the same, to the byte.
        document["UUID"] = str(uuid.uuid5(UUID_NAMESPACE, str(provenance["key"])))
    xml = tifffile.OmeXml(**document)
    try:
        xml.addimage(
            dtype,
            tuple(sizes),
            (num_planes, 1, 1, height, width, 1),
            axes="TCZYX",
            **metadata,
        )
    except tifffile.OmeXmlError as error:
        raise ValueError(f"OME can't hold this volume: {error}") from error
    return {"description": xml.tostring(declaration=True).encode()}
