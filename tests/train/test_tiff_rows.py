"""What TIFFs are like in practice: each kind written with tifffile, read and enlarged
with ours, and read back with tifffile: axes, dtype, voxel size, unit, values."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile

from train.data import tiff_write
from train.data.tiff import VolumeWriter, open_volume, scaled_geometry

SCALE = (1, 2, 2)


def voxels(shape, dtype="uint16", seed=0):
    values = np.random.default_rng(seed).integers(0, 120, shape)
    return values.astype(dtype)


def repeat(array, scale=SCALE):
    for axis, s in zip((-3, -2, -1), scale, strict=True):
        array = np.repeat(array, s, axis)
    return array


def enlarge(volume, path, scale=SCALE, slab=2, **options):
    """Each voxel becomes several, slab by slab, as an upscaler would; the writer."""
    size, origin = scaled_geometry(volume.voxel_size, volume.origin, scale)
    sizes = volume.sizes
    shape = [sizes[a] * dict(zip("ZYX", scale, strict=True)).get(a, 1) for a in "TCZYX"]
    shape = [n for n, a in zip(shape, "TCZYX", strict=True) if a in volume.axes]
    arguments = (shape, volume.axes, volume.dtype, size, volume.unit, origin)
    with VolumeWriter(path, *arguments, like=volume, **options) as writer:
        for t, c in volume.positions:
            for z in range(0, sizes["Z"], slab):
                writer.append(repeat(volume.read(t, c, slice(z, z + slab)), scale))
    return writer


def load(volume):
    parts = [volume.read(t, c) for t, c in volume.positions]
    return np.stack(parts).reshape(volume.shape)


class Written:
    """A file as tifffile sees it."""

    def __init__(self, path):
        with tifffile.TiffFile(path) as file:
            (series,) = file.series
            self.axes, self.kind = series.axes, series.kind
            self.array = series.asarray()
            self.imagej = file.imagej_metadata
            self.xml = file.ome_metadata
            self.bigtiff = file.is_bigtiff
            page = file.pages.first
            self.photometric = page.photometric.name
            self.compression = page.compression.name
            self.x, self.y = (
                page.tags[code].value[1] / page.tags[code].value[0]
                for code in (282, 283)
            )

    def elements(self, name):
        found = ElementTree.fromstring(self.xml).iter()
        return [element.attrib for element in found if element.tag.endswith(name)]

    def pixels(self):
        (pixels,) = self.elements("Pixels")
        return pixels


@pytest.mark.parametrize("metadata", [{}, None], ids=["QYX", "IYX"])
def test_plain_pages_are_read_as_slices_and_it_is_said(tmp_path, metadata):
    array = voxels((5, 6, 7))
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, photometric="minisblack", metadata=metadata)
    volume = open_volume(path)
    assert (volume.axes, volume.shape, volume.dtype) == ("ZYX", (5, 6, 7), np.uint16)
    assert "no name and is read as Z" in volume.description
    assert volume.memory_mapped
    np.testing.assert_array_equal(load(volume), array)
    assert open_volume(path, axes="TYX").axes == "TZYX"
    assert open_volume(path, axes="CYX").positions == [(0, c) for c in range(5)]
    enlarge(volume, tmp_path / "out.tif")
    written = Written(tmp_path / "out.tif")
    assert (written.axes, written.kind) == ("ZYX", "imagej")
    np.testing.assert_array_equal(written.array, repeat(array))


@pytest.mark.parametrize("metadata", [{}, None])
def test_pages_written_one_by_one_are_joined(tmp_path, metadata):
    array = voxels((5, 6, 7))
    path = tmp_path / "in.tif"
    with tifffile.TiffWriter(path) as writer:
        for page in array:
            writer.write(page, metadata=metadata)
    volume = open_volume(path)
    assert volume.axes == "ZYX"
    np.testing.assert_array_equal(load(volume), array)
    np.testing.assert_array_equal(open_volume(path, axes="TYX").read(t=3), array[3:4])
    enlarge(volume, tmp_path / "out.tif")
    np.testing.assert_array_equal(Written(tmp_path / "out.tif").array, repeat(array))


@pytest.mark.parametrize("slices", [3, 4])
def test_three_slices_are_not_colours(tmp_path, slices):
    array = voxels((slices, 6, 7), "uint8")
    for form in ("out.tif", "out.ome.tif"):
        path = tmp_path / form
        with VolumeWriter(path, array.shape, "ZYX", array.dtype) as writer:
            writer.append(array)
        written = Written(path)
        assert (written.axes, written.photometric) == ("ZYX", "MINISBLACK")
        np.testing.assert_array_equal(written.array, array)
        assert open_volume(path).axes == "ZYX"


def test_colour_planes_that_are_slices(tmp_path):
    # What tifffile made of three slices without photometric, in many labs' folders.
    array = voxels((3, 6, 7), "uint8")
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, photometric="rgb", planarconfig="separate")
    with pytest.raises(ValueError, match="give --axes ZYX .in Python axes='ZYX'"):
        open_volume(path)
    for compression in (None, "zlib"):
        tifffile.imwrite(
            path,
            array,
            photometric="rgb",
            planarconfig="separate",
            compression=compression,
        )
        volume = open_volume(path, axes="ZYX")
        np.testing.assert_array_equal(load(volume), array)
        enlarge(volume, tmp_path / "out.tif")
        assert Written(tmp_path / "out.tif").photometric == "MINISBLACK"


@pytest.mark.parametrize("imagej", [False, True])
def test_colour_is_refused(tmp_path, imagej):
    path = tmp_path / "in.tif"
    array = voxels((4, 6, 7, 3), "uint8")
    tifffile.imwrite(path, array, photometric="rgb", imagej=imagej)
    with pytest.raises(ValueError, match=r"in.tif can't be opened: .*colour.*grey"):
        open_volume(path)


def test_imagej_without_axes_has_channels(tmp_path):
    path = tmp_path / "in.tif"
    array = voxels((5, 6, 7))
    tifffile.imwrite(path, array, imagej=True)
    volume = open_volume(path)
    assert volume.axes == "CZYX"
    assert "give --axes ZYX (in Python axes='ZYX')" in volume.description
    volume = open_volume(path, axes="ZYX")
    assert volume.shape == (5, 6, 7)
    enlarge(volume, tmp_path / "out.tif")
    written = Written(tmp_path / "out.tif")
    assert (written.axes, written.imagej["slices"]) == ("ZYX", 5)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("axes", ["ZYX", "CZYX", "TZYX", "TCZYX"])
def test_imagej_order_of_time_slice_and_channel(tmp_path, axes, compression):
    sizes = dict(zip("TCZYX", (2, 3, 4, 5, 6), strict=True))
    array = voxels([sizes[a] for a in axes])
    stored, names = array, axes
    if "C" in axes:
        stored, names = np.swapaxes(array, -3, -4), axes.replace("CZ", "ZC")
    tifffile.imwrite(
        tmp_path / "in.tif",
        stored,
        imagej=True,
        compression=compression,
        metadata={"axes": names},
    )
    volume = open_volume(tmp_path / "in.tif")
    assert (volume.axes, volume.shape) == (axes, array.shape)
    assert len(volume.positions) == sizes["T"] ** ("T" in axes) * 3 ** ("C" in axes)
    np.testing.assert_array_equal(load(volume), array)
    enlarge(volume, tmp_path / "out.tif", scale=(2, 1, 2), slab=3)
    written = Written(tmp_path / "out.tif")
    assert (written.axes, written.kind) == (names, "imagej")
    expected = repeat(array, (2, 1, 2))
    if "C" in axes:
        expected = np.swapaxes(expected, -3, -4)
    np.testing.assert_array_equal(written.array, expected)
    assert written.compression == ("NONE" if compression is None else "ADOBE_DEFLATE")


IMAGEJ = ["uint8", "uint16", "int16", "float32"]
OTHERS = ["int8", "int32", "uint32", "float64"]


@pytest.mark.parametrize("dtype", IMAGEJ + OTHERS)
def test_dtype_is_kept_and_decides_the_format(tmp_path, dtype):
    array = voxels((3, 6, 7), dtype)
    if array.dtype.kind != "u":
        array -= 60
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, photometric="minisblack", metadata={"axes": "ZYX"})
    writer = enlarge(open_volume(path), tmp_path / "out.tif")
    written = Written(tmp_path / "out.tif")
    assert (written.axes, written.array.dtype) == ("ZYX", dtype)
    np.testing.assert_array_equal(written.array, repeat(array))
    assert written.kind == ("imagej" if dtype in IMAGEJ else "ome")
    assert bool(writer.notes) == (dtype in OTHERS)


@pytest.mark.parametrize("dtype", ["float16", "int64", "uint64", "bool", "complex64"])
def test_dtypes_that_nobody_opens_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"got {dtype}: convert with to_dtype"):
        VolumeWriter(tmp_path / "out.tif", (2, 3, 4), "ZYX", dtype)
    assert list(tmp_path.iterdir()) == []


def test_complex_voxels_are_refused(tmp_path):
    array = voxels((2, 3, 4), "complex64")
    tifffile.imwrite(tmp_path / "in.tif", array, photometric="minisblack")
    with pytest.raises(ValueError, match="integers or floats, got complex64"):
        open_volume(tmp_path / "in.tif")


def test_bits_are_bytes(tmp_path):
    array = voxels((2, 3, 20)) > 60
    tifffile.imwrite(tmp_path / "in.tif", array, photometric="minisblack")
    volume = open_volume(tmp_path / "in.tif")
    assert volume.dtype == np.uint8
    np.testing.assert_array_equal(volume.read(x_slice=slice(5, 18)), array[..., 5:18])


@pytest.mark.parametrize("metadata", [{"axes": "ZYX"}, {"axes": "YX"}])
@pytest.mark.parametrize("form", ["imagej", "ome"])
def test_one_slice(tmp_path, form, metadata):
    array = voxels((1, 6, 7)).reshape([1, 6, 7][3 - len(metadata["axes"]) :])
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, **{form: True}, metadata=metadata)
    volume = open_volume(path)
    assert (volume.axes, volume.shape) == ("ZYX", (1, 6, 7))
    enlarge(volume, tmp_path / "out.tif")
    written = Written(tmp_path / "out.tif")
    assert (written.axes, written.kind) == ("YX", form)  # both drop Z
    np.testing.assert_array_equal(written.array, repeat(array.reshape(1, 6, 7))[0])
    assert open_volume(tmp_path / "out.tif").shape == (1, 12, 14)


@pytest.mark.parametrize("unit", ["um", "micron", "\\u00B5m", "nm", "mm"])
def test_imagej_spacing(tmp_path, unit):
    array = voxels((4, 6, 7))
    tifffile.imwrite(
        tmp_path / "in.tif",
        array,
        imagej=True,
        resolution=(1 / 0.25, 1 / 0.3),
        metadata={"axes": "ZYX", "spacing": 1.5, "unit": unit, "finterval": 2.5},
    )
    volume = open_volume(tmp_path / "in.tif")
    assert volume.voxel_size == pytest.approx((1.5, 0.3, 0.25))
    assert volume.unit == ("µm" if unit[0] == "\\" else unit)
    assert volume.origin is None
    enlarge(volume, tmp_path / "out.tif", (3, 2, 1))
    written = Written(tmp_path / "out.tif")
    assert written.imagej["spacing"] == pytest.approx(0.5)
    assert (written.y, written.x) == pytest.approx((0.15, 0.25))
    assert written.imagej["unit"] == unit
    assert written.imagej["finterval"] == 2.5
    # In pixels: where the input's first centre lies among the output's.
    origins = [written.imagej[f"{axis}origin"] for axis in "zyx"]
    assert origins == pytest.approx([1.0, 0.5, 0.0])
    again = open_volume(tmp_path / "out.tif")
    assert again.origin == pytest.approx((-0.5, -0.075, 0.0))
    assert again.unit == volume.unit


def test_imagej_origin_moves_with_the_voxels(tmp_path):
    metadata = {"axes": "ZYX", "spacing": 2.0, "unit": "um"}
    metadata |= {"xorigin": 10, "yorigin": -4.5, "zorigin": 3}
    tifffile.imwrite(
        tmp_path / "in.tif",
        voxels((4, 6, 7)),
        imagej=True,
        resolution=(4, 2),
        metadata=metadata,
    )
    volume = open_volume(tmp_path / "in.tif")
    assert volume.origin == pytest.approx((-6.0, 2.25, -2.5))
    enlarge(volume, tmp_path / "out.tif", (1, 2, 4))
    found = Written(tmp_path / "out.tif").imagej
    # ImageJ: position = (pixel - origin) size. Input pixel 10 is output pixel 41.5.
    origins = [found[f"{axis}origin"] for axis in "xyz"]
    assert origins == pytest.approx([10 * 4 + 1.5, -4.5 * 2 + 0.5, 3])


def test_ome_spacing_and_position(tmp_path):
    array = voxels((2, 3, 6, 7))
    metadata = {
        "axes": "CZYX",
        "Name": "cells",
        "Channel": {"Name": ["DAPI", "actin"], "Color": [255, 65535]},
        "Plane": {
            "PositionX": [100.0] * 6,
            "PositionXUnit": ["nm"] * 6,
            "PositionY": [2.0] * 6,
            "PositionZ": [5.0, 5.5, 6.0] * 2,
        },
    }
    sizes = {"X": (0.25, "µm"), "Y": (300.0, "nm"), "Z": (0.5, "µm")}
    for axis, (size, unit) in sizes.items():
        metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": unit}
    tifffile.imwrite(tmp_path / "in.tif", array, ome=True, metadata=metadata)
    volume = open_volume(tmp_path / "in.tif")
    assert (volume.axes, volume.unit) == ("CZYX", "µm")
    assert volume.voxel_size == pytest.approx((0.5, 0.3, 0.25))
    assert volume.origin == pytest.approx((5.0, 2.0, 0.1))
    enlarge(volume, tmp_path / "out.tif", (2, 2, 5))
    written = Written(tmp_path / "out.tif")
    assert (written.kind, written.axes) == ("ome", "CZYX")
    np.testing.assert_array_equal(written.array, repeat(array, (2, 2, 5)))
    pixels = written.pixels()
    found = [float(pixels[f"PhysicalSize{axis}"]) for axis in "ZYX"]
    assert found == pytest.approx([0.25, 0.15, 0.05])
    assert {pixels[f"PhysicalSize{axis}Unit"] for axis in "XYZ"} == {"µm"}
    first = [5.0 - 0.25 / 2, 2.0 - 0.15 / 2, 0.1 - 0.1]
    expected = [[first[0] + 0.25 * z, *first[1:]] for z in range(6)] * 2
    planes = written.elements("Plane")
    found = [[float(p[f"Position{axis}"]) for axis in "ZYX"] for p in planes]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert all(f'Name="{name}"' in written.xml for name in ("DAPI", "actin", "cells"))


def test_micron_is_written_to_ome_as_it_must_be(tmp_path):
    path = tmp_path / "in.tif"
    metadata = {"axes": "ZYX", "spacing": 2.0, "unit": "micron"}
    tifffile.imwrite(path, voxels((2, 6, 7)), imagej=True, metadata=metadata)
    writer = enlarge(open_volume(path), tmp_path / "out.ome.tif")
    assert (writer.format, writer.notes) == ("ome", ())
    pixels = Written(tmp_path / "out.ome.tif").pixels()
    assert pixels["PhysicalSizeZUnit"] == "µm"
    assert float(pixels["PhysicalSizeX"]) == 0.5


@pytest.mark.parametrize(
    "resolution, code, unit, size",
    [
        ((400, 200), 3, "cm", (1 / 200, 1 / 400)),
        ((96, 96), 2, "inch", (1 / 96, 1 / 96)),
        ((72, 72), 2, None, None),
        ((1, 1), 1, None, None),
    ],
)
def test_resolution_of_three_values(tmp_path, resolution, code, unit, size):
    """(x, y, unit) in the tags of a plain file; 72 dots an inch are a default."""
    path = tmp_path / "in.tif"
    options = {"resolution": resolution, "resolutionunit": code}
    tifffile.imwrite(path, voxels((2, 6, 7)), photometric="minisblack", **options)
    volume = open_volume(path)
    assert volume.unit == unit
    assert (volume.voxel_size or (None, None))[1:] == pytest.approx(size or (None,))
    enlarge(volume, tmp_path / "out.tif")
    written = Written(tmp_path / "out.tif")
    assert (written.y, written.x) == pytest.approx(
        (1, 1) if size is None else tuple(s / 2 for s in size)
    )
    assert written.imagej.get("unit") == unit


CODECS = ["lzw", "zstd", "zlib", "packbits", "lzma"]


@pytest.mark.parametrize("layout", [{}, {"tile": (16, 32)}, {"rowsperstrip": 5}])
@pytest.mark.parametrize("codec", CODECS)
def test_compression_is_read_by_parts_and_kept(tmp_path, codec, layout):
    array = voxels((3, 37, 50))
    path = tmp_path / "in.tif"
    tifffile.imwrite(
        path,
        array,
        photometric="minisblack",
        compression=codec,
        predictor=codec in ("lzw", "zlib"),
        metadata={"axes": "ZYX"},
        **layout,
    )
    volume = open_volume(path)
    assert not volume.memory_mapped
    for z, y, x in [
        (slice(1, 3), slice(4, 33), slice(30, 49)),
        (slice(2, 3), slice(15, 16), slice(31, 33)),
        (slice(0, 1), slice(36, 99), slice(-3, None)),
        (slice(2, 2), slice(None), slice(None)),
    ]:
        np.testing.assert_array_equal(volume.read(0, 0, z, y, x), array[z, y, x])
    enlarge(volume, tmp_path / "out.tif")
    written = Written(tmp_path / "out.tif")
    assert written.compression == {"zlib": "ADOBE_DEFLATE"}.get(codec, codec.upper())
    np.testing.assert_array_equal(written.array, repeat(array))


def test_compression_with_loss_is_not_repeated(tmp_path):
    array = np.tile(np.arange(64, dtype=np.uint8) * 2, (2, 48, 1))
    path = tmp_path / "in.tif"
    options = {"photometric": "minisblack", "compression": "jpeg"}
    tifffile.imwrite(path, array, **options)
    volume = open_volume(path)
    np.testing.assert_allclose(load(volume), array, atol=6)  # JPEG's own loss
    np.testing.assert_array_equal(load(volume), tifffile.imread(path))
    writer = enlarge(volume, tmp_path / "out.tif")
    assert "deflate, without loss, instead of jpeg" in writer.notes[0]
    np.testing.assert_array_equal(
        Written(tmp_path / "out.tif").array, repeat(tifffile.imread(path))
    )


def test_floats_that_imagej_opens_have_no_predictor(tmp_path):
    array = voxels((2, 20, 30), "float32")
    path = tmp_path / "in.tif"
    options = {"compression": "zlib", "predictor": True, "metadata": {"axes": "ZYX"}}
    tifffile.imwrite(path, array, photometric="minisblack", **options)
    enlarge(open_volume(path), tmp_path / "out.tif")
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.pages.first.predictor == 1
        np.testing.assert_array_equal(file.asarray(), repeat(array))


@pytest.mark.parametrize(
    "options",
    [
        {"photometric": "minisblack"},
        {"photometric": "minisblack", "byteorder": ">"},
        {"photometric": "minisblack", "bigtiff": True},
        {"imagej": True, "metadata": {"axes": "ZYX"}},
        {"ome": True, "metadata": {"axes": "ZYX"}},
    ],
)
def test_plain_data_is_mapped(tmp_path, options):
    array = voxels((3, 6, 7))
    tifffile.imwrite(tmp_path / "in.tif", array, **options)
    volume = open_volume(tmp_path / "in.tif")
    assert volume.memory_mapped
    part = volume.read(z_slice=slice(1, 3), y_slice=slice(2, 5), x_slice=slice(1, 6))
    np.testing.assert_array_equal(part, array[1:3, 2:5, 1:6])
    part += 1  # our own copy, not the file


def test_strips_that_lie_in_another_order(tmp_path):
    array = voxels((2, 4, 16))
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, rowsperstrip=2, ome=True, metadata={"axes": "ZYX"})
    with tifffile.TiffFile(path, mode="r+") as file:
        page = file.pages[1]
        page.tags["StripOffsets"].overwrite(page.dataoffsets[::-1])
    volume = open_volume(path)
    expected = array.copy()
    expected[1] = np.roll(array[1], 2, axis=0)  # the two strips change places
    np.testing.assert_array_equal(load(volume), expected)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32", "float64"])
def test_big_endian(tmp_path, dtype, compression):
    array = voxels((3, 6, 7), dtype)
    path = tmp_path / "in.tif"
    options = {"compression": compression, "photometric": "minisblack"}
    tifffile.imwrite(path, array, byteorder=">", **options)
    volume = open_volume(path)
    assert volume.dtype == np.dtype(dtype)
    assert volume.dtype.isnative
    assert volume.read().dtype.isnative
    np.testing.assert_array_equal(load(volume), array)
    enlarge(volume, tmp_path / "out.tif")
    np.testing.assert_array_equal(Written(tmp_path / "out.tif").array, repeat(array))


def test_mixed_pages_are_listed(tmp_path):
    path = tmp_path / "in.tif"
    arrays = [voxels((3, 6, 7)), voxels((2, 8, 9), "float32")]
    with tifffile.TiffWriter(path) as writer:
        for array in arrays:
            writer.write(array, photometric="minisblack", metadata={"axes": "ZYX"})
    with pytest.raises(ValueError) as caught:
        open_volume(path)
    assert "0: ZYX 3x6x7 uint16, 1: ZYX 2x8x9 float32" in str(caught.value)
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(load(open_volume(path, series=i)), array)
    for series in (2, -1):
        with pytest.raises(
            ValueError, match=f"series must be from 0 to 1, got {series}"
        ):
            open_volume(path, series=series)


def test_series_of_ome_have_their_own_sizes(tmp_path):
    path = tmp_path / "in.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        for size in (0.5, 0.125):
            metadata = {"axes": "ZYX", "PhysicalSizeX": size}
            writer.write(voxels((3, 6, 7)), metadata=metadata)
    with pytest.raises(ValueError, match="it holds 2 images"):
        open_volume(path)
    assert open_volume(path, series=1).voxel_size == (None, None, 0.125)


def test_pyramid_is_read_at_its_largest(tmp_path):
    array = voxels((2, 64, 64))
    path = tmp_path / "in.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(array, subifds=1, tile=(32, 32), metadata={"axes": "ZYX"})
        writer.write(array[:, ::2, ::2], tile=(32, 32), subfiletype=1)
    volume = open_volume(path)
    assert "the largest of 2 levels" in volume.description
    np.testing.assert_array_equal(load(volume), array)
    enlarge(volume, tmp_path / "out.tif")
    np.testing.assert_array_equal(Written(tmp_path / "out.tif").array, repeat(array))


def test_imagej_of_one_page_for_all_planes(tmp_path):
    # ImageJ's own way to store more than 4 GB; tifffile writes it on demand.
    array = voxels((4, 6, 7))
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, imagej=True, truncate=True, metadata={"axes": "ZYX"})
    volume = open_volume(path)
    np.testing.assert_array_equal(load(volume), array)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(ValueError, match="truncated"):
        open_volume(path)


def test_over_four_gigabytes(tmp_path, monkeypatch):
    # The limit is lowered: 4 GB of zeros would take seconds and a disk.
    array = voxels((3, 6, 7))
    path = tmp_path / "in.tif"
    metadata = {"axes": "ZYX", "spacing": 2.0, "unit": "um"}
    tifffile.imwrite(path, array, imagej=True, metadata=metadata)
    volume = open_volume(path)
    for limit, form in ((10_000, "imagej"), (1_000, "ome")):
        monkeypatch.setattr(tiff_write, "CLASSIC_BYTES", limit)
        writer = enlarge(volume, tmp_path / "out.tif")
        written = Written(tmp_path / "out.tif")
        assert (written.kind, written.axes) == (form, "ZYX")
        assert written.bigtiff == (form == "ome")
        np.testing.assert_array_equal(written.array, repeat(array))
    assert "ends at 4 GB" in writer.notes[0]
    assert float(written.pixels()["PhysicalSizeZ"]) == 2.0
    assert open_volume(tmp_path / "out.tif").unit == "µm"


def test_a_volume_of_five_gigabytes_goes_where_it_fits(tmp_path):
    shape = (5, 2**15, 2**14)
    path = tmp_path / "out.tif"
    # Compressed, so that no disk is asked for the room beforehand.
    writer = VolumeWriter(path, shape, "ZYX", "uint16", compression="zstd")
    assert (writer.format, writer.bigtiff) == ("ome", True)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_display_of_channels_is_kept(tmp_path):
    luts = [np.zeros((3, 256), np.uint8) for _ in range(2)]
    luts[0][0], luts[1][1] = np.arange(256), np.arange(256)
    metadata = {"axes": "ZCYX", "mode": "composite", "LUTs": luts, "Info": "made by us"}
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, voxels((3, 2, 6, 7)), imagej=True, metadata=metadata)
    enlarge(open_volume(path), tmp_path / "out.tif")
    found = Written(tmp_path / "out.tif").imagej
    assert (found["mode"], found["Info"]) == ("composite", "made by us")
    np.testing.assert_array_equal(found["LUTs"], luts)


def test_nan_is_a_value_like_others(tmp_path):
    array = voxels((3, 6, 7), "float32")
    array[1, 2, 3], array[0, 0, 0] = np.nan, np.inf
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, array, photometric="minisblack")
    enlarge(open_volume(path), tmp_path / "out.tif")
    np.testing.assert_array_equal(Written(tmp_path / "out.tif").array, repeat(array))


def test_provenance_is_for_us_and_not_for_others(tmp_path):
    provenance = {"model": "a=b.safetensors", "psnr": np.float32(31.5), "é": [1, None]}
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, voxels((3, 6, 7)), photometric="minisblack")
    for form in ("out.tif", "out.ome.tif"):
        enlarge(open_volume(path), tmp_path / form, provenance=provenance)
        volume = open_volume(tmp_path / form)
        assert volume.provenance == {**provenance, "psnr": 31.5}
        written = Written(tmp_path / form)
        assert written.axes == "ZYX"
        if form == "out.tif":
            assert "psnr" in written.imagej["jaxops_provenance"]
        else:
            assert re.search("CommentAnnotation.*jaxops/provenance.*psnr", written.xml)
    assert open_volume(path).provenance is None
    with pytest.raises(ValueError, match=r"provenance must hold .*\(got a set"):
        enlarge(open_volume(path), tmp_path / "no.tif", provenance={"x": {1, 2}})
    assert not (tmp_path / "no.tif").exists()
