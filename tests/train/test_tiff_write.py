"""The writer: whole or not at all, in constant memory; rounding to integers."""

import os
import tracemalloc

import numpy as np
import pytest
import tifffile
from PIL import Image

from train.data.tiff import VolumeWriter, open_volume, to_dtype

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def voxels(shape, dtype="uint16", seed=0):
    return np.random.default_rng(seed).integers(0, 120, shape).astype(dtype)


def write(path, array, axes="ZYX", slab=1, **options):
    with VolumeWriter(path, array.shape, axes, array.dtype, **options) as writer:
        for volume in array.reshape(-1, *array.shape[-3:]):
            for z in range(0, len(volume), slab):
                writer.append(volume[z : z + slab])
    return writer


def clip_exactly(value, dtype):
    """The integer, and whether it was clipped.

    Python's integers have no end, and its round() takes halves to even.
    """
    limits = np.iinfo(dtype)
    if np.isnan(value):
        return 0, True
    if np.isinf(value):
        return (limits.max if value > 0 else limits.min), True
    rounded = round(value.item())
    clipped = min(max(rounded, limits.min), limits.max)
    return clipped, clipped != rounded


@pytest.mark.parametrize("source", ["float16", "float32", "float64", *INTEGERS])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_rounded_and_clipped_and_counted(source, dtype):
    numbers = [0.5, 1.5, 2.5, -0.5, -0.51, -3.7, 126.5, 255.4, 255.5, 65535.5, 1e9]
    edges = [2.0**k + d for k in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1)]
    numbers += edges + [-edge for edge in edges] + [np.nan, np.inf, -np.inf]
    if "float" in source:
        with np.errstate(over="ignore"):  # float16 has infinity from 65520
            array = np.array(numbers).astype(source)
    else:
        limits = np.iinfo(source)
        numbers = [limits.min, limits.max, 0, 1, 127]
        numbers += [2**k - 1 for k in (7, 8, 15, 16, 31, 32, 63)]
        numbers += [-(2**k) for k in (7, 15, 31, 63)]
        fitting = [n for n in numbers if limits.min <= n <= limits.max]
        array = np.array(fitting, source)
    result, num_clipped = to_dtype(array, dtype)
    expected = [clip_exactly(value, dtype) for value in array]
    assert result.dtype == np.dtype(dtype)
    assert result.tolist() == [value for value, _ in expected]
    assert num_clipped == sum(clipped for _, clipped in expected)


def test_negative_values_do_not_wrap():
    result, num_clipped = to_dtype(np.float32([-3.2, -0.4, 70000, 12.6]), "uint16")
    assert result.tolist() == [0, 0, 65535, 13]
    assert num_clipped == 2


def test_floats_stay_or_are_clipped():
    array = np.array([1e300, -1e300, np.inf, np.nan, 0.1])
    result, num_clipped = to_dtype(array, "float32")
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(
        result, np.array([largest, -largest, np.inf, np.nan, 0.1], np.float32)
    )
    assert num_clipped == 2
    same, num_clipped = to_dtype(array.astype(">f8"), "float64")
    np.testing.assert_array_equal(same, array)
    assert num_clipped == 0
    assert to_dtype(np.uint16([7]), "float32")[0].dtype == np.float32


@pytest.mark.parametrize("source, dtype", [("complex64", "uint8"), ("float32", "bool")])
def test_conversions_that_make_no_sense(source, dtype):
    with pytest.raises(ValueError, match=f"got {source} to {dtype}"):
        to_dtype(np.zeros(3, source), dtype)


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("form", ["out.tif", "out.ome.tif"])
@pytest.mark.parametrize(
    "axes, shape",
    [
        ("ZYX", (1, 1, 1)),
        ("ZYX", (7, 16, 16)),
        ("ZYX", (3, 5, 3)),
        ("ZYX", (5, 301, 3)),
        ("CZYX", (2, 5, 17, 13)),
        ("CZYX", (3, 1, 4, 4)),
        ("TCZYX", (2, 3, 4, 9, 8)),
    ],
)
def test_shapes_and_slabs(tmp_path, axes, shape, form, compression):
    array = voxels(shape)
    for slab in (1, 3, 99):
        writer = write(tmp_path / form, array, axes, slab, compression=compression)
        assert writer.position is None
        volume = open_volume(tmp_path / form)
        assert (volume.axes, volume.shape, volume.notes[1:]) == (axes, shape, ())
        parts = [volume.read(t, c) for t, c in volume.positions]
        np.testing.assert_array_equal(np.stack(parts).reshape(shape), array)
    found = tifffile.imread(tmp_path / form)
    if form == "out.tif" and "C" in axes:
        found = found.reshape(shape[:-4] + (shape[-3], shape[-4]) + shape[-2:])
        found = np.swapaxes(found, -3, -4)
    np.testing.assert_array_equal(found.reshape(shape), array)
    assert [path.name for path in tmp_path.iterdir()] == [form]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("compression", [None, "deflate", "lzw", "packbits"])
def test_another_reader_sees_the_same_pages(tmp_path, compression, dtype):
    # Pillow reads with libtiff, and knows nothing of ImageJ or OME.
    array = voxels((2, 3, 21, 18), dtype)
    pages = {
        "out.tif": array.swapaxes(0, 1).reshape(6, 21, 18),  # the channels together
        "out.ome.tif": array.reshape(6, 21, 18),
    }
    for form, expected in pages.items():
        write(tmp_path / form, array, "CZYX", compression=compression)
        with Image.open(tmp_path / form) as image:
            assert image.n_frames == 6
            for i, page in enumerate(expected):
                image.seek(i)
                np.testing.assert_array_equal(np.asarray(image), page)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_nothing_appears_before_all_is_there(tmp_path, compression):
    path = tmp_path / "out.tif"
    path.write_bytes(b"what was there before")
    array = voxels((4, 6, 7))
    options = {"compression": compression}
    writer = VolumeWriter(path, array.shape, "ZYX", array.dtype, **options)
    assert writer.position == (0, 0, 0)
    writer.append(array[:3])
    assert writer.position == (0, 0, 3)
    assert path.read_bytes() == b"what was there before"
    with pytest.raises(ValueError, match="must have 4 slices, got 3"):
        writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.append(array[3:])
    with pytest.raises(RuntimeError, match="out of memory"):  # noqa: SIM117
        with VolumeWriter(path, array.shape, "ZYX", array.dtype, **options) as writer:
            writer.append(array)
            raise RuntimeError("the device ran out of memory")
    assert path.read_bytes() == b"what was there before"
    assert os.listdir(tmp_path) == ["out.tif"]
    write(path, array, **options)
    np.testing.assert_array_equal(tifffile.imread(path), array)
    writer.close()  # a second time does nothing


def test_a_volume_over_itself(tmp_path):
    path = tmp_path / "in.tif"
    array = voxels((4, 6, 7))
    write(path, array)
    volume = open_volume(path)
    with VolumeWriter(path, volume.shape, volume.axes, volume.dtype) as writer:
        for z in range(4):
            writer.append(volume.read(z_slice=slice(z, z + 1)) + np.uint16(1))
    np.testing.assert_array_equal(tifffile.imread(path), array + 1)


def test_slabs_that_do_not_fit(tmp_path):
    array = voxels((2, 4, 6, 7))
    path = tmp_path / "out.tif"
    with VolumeWriter(path, array.shape, "CZYX", array.dtype) as writer:
        writer.append(array[0, :3])
        with pytest.raises(ValueError, match=r"have shape \(slices, 6, 7\), got"):
            writer.append(array[0, 3:, :, :5])
        with pytest.raises(ValueError, match=r"have shape \(slices, 6, 7\), got"):
            writer.append(array[0, 3])
        with pytest.raises(ValueError, match="have dtype uint16, got float32"):
            writer.append(array[0, 3:].astype(np.float32))
        with pytest.raises(ValueError, match=r"lacks 1 of its 4 .*\(0, 0, 3\), got 2"):
            writer.append(array[0, 2:])
        writer.append(array[0, 3:])  # a refused slab has left nothing behind
        assert writer.position == (0, 1, 0)
        writer.append(array[1].astype(">u2"))
        with pytest.raises(ValueError, match=r"lacks 0 of its 4 .*None, got 1"):
            writer.append(array[0, :1])
    np.testing.assert_array_equal(open_volume(path).read(c=1), array[1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"axes": "YX", "shape": (3, 4)}, "axes must be ZYX, CZYX"),
        ({"axes": "CZYX"}, "with one length each"),
        ({"shape": (0, 3, 4)}, "integers from 1"),
        ({"shape": (2.5, 3, 4)}, "integers from 1"),
        ({"voxel_size": (1.0, 0.0, 1.0)}, "voxel_size must be three finite"),
        ({"voxel_size": (1.0, 1.0)}, "voxel_size must be three finite"),
        ({"origin": (1.0, np.nan, 1.0)}, "origin must be three finite"),
        ({"compression": "jpeg"}, "compression must be"),
    ],
)
def test_volumes_that_can_not_be_written(tmp_path, change, message):
    arguments = {"shape": (2, 3, 4), "axes": "ZYX", "dtype": "uint8"} | change
    with pytest.raises(ValueError, match=message):
        VolumeWriter(tmp_path / "out.tif", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_and_a_folder_is_no_file(tmp_path):
    write(tmp_path / "new" / "out.tif", voxels((2, 3, 4)))
    assert (tmp_path / "new" / "out.tif").exists()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "new", voxels((2, 3, 4)))
    assert os.listdir(tmp_path) == ["new"]


def test_three_voxel_sizes_of_any_magnitude(tmp_path):
    array = voxels((2, 3, 4))
    for size in (1e-7, 0.1, 1 / 3, 6.45e-2, 123.456, 1e5):
        calibration = {"voxel_size": (2 * size, size, 3 * size), "unit": "mm"}
        for form in ("out.tif", "out.ome.tif"):
            writer = write(tmp_path / form, array, **calibration)
            assert (writer.format == "imagej") == (form == "out.tif")
            found = open_volume(tmp_path / form)
            assert found.unit == "mm"
            expected = pytest.approx((2 * size, size, 3 * size), rel=1e-6)
            assert found.voxel_size == expected
    # Over 2^32 pixels a metre: a TIFF's rational number can't hold them, OME can.
    calibration = {"voxel_size": (1e-10, 1e-10, 1e-10), "unit": "m"}
    writer = write(tmp_path / "out.tif", array, **calibration)
    assert writer.format == "ome"
    assert "pixels a m" in writer.notes[0]
    assert open_volume(tmp_path / "out.tif").voxel_size == (1e-10, 1e-10, 1e-10)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_writing_takes_memory_for_a_slab(tmp_path, compression):
    shape, slab = (64, 512, 512), np.zeros((2, 512, 512), np.uint16)
    tracemalloc.start()
    options = {"compression": compression}
    with VolumeWriter(tmp_path / "a.tif", shape, "ZYX", "uint16", **options) as writer:
        for _ in range(32):
            writer.append(slab)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * slab.nbytes
    assert open_volume(tmp_path / "a.tif").shape == shape
