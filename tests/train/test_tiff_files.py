"""Several files as one volume; files that are truncated, damaged, or something else."""

import tracemalloc

import numpy as np
import pytest
import tifffile

from train.data import tiff_planes
from train.data.tiff import VolumeWriter, open_volume

GREY = {"photometric": "minisblack"}


def voxels(shape, dtype="uint16", seed=0):
    return np.random.default_rng(seed).integers(0, 120, shape).astype(dtype)


def write_slices(folder, array, name="z{}.tif", **options):
    folder.mkdir(exist_ok=True)
    paths = [folder / name.format(i) for i in range(len(array))]
    for path, plane in zip(paths, array, strict=True):
        tifffile.imwrite(path, plane, **GREY, **options)
    return paths


def write_ome_set(folder, array, names, channels=1):
    """One file a plane, each with the same metadata; (c z) y x."""
    depth = len(names) // channels
    data = "".join(
        f'<TiffData FirstC="{i // depth}" FirstZ="{i % depth}" FirstT="0" IFD="0" '
        f'PlaneCount="1"><UUID FileName="{name}">urn:uuid:{i}</UUID></TiffData>'
        for i, name in enumerate(names)
    )
    height, width = array.shape[1:]
    for i, name in enumerate(names):
        xml = (
            '<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy'
            f'.org/Schemas/OME/2016-06" UUID="urn:uuid:{i}"><Image ID="Image:0">'
            f'<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" '
            f'SizeX="{width}" SizeY="{height}" SizeZ="{depth}" SizeC="{channels}" '
            f'SizeT="1" PhysicalSizeX="0.5">{data}</Pixels></Image></OME>'
        )
        options = {"description": xml, "metadata": None}
        tifffile.imwrite(folder / name, array[i], **GREY, **options)
    return [folder / name for name in names]


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_folder_of_slices_in_natural_order(tmp_path, compression):
    array = voxels((12, 6, 7))
    paths = write_slices(tmp_path / "cells", array, compression=compression)
    paths[3].rename(paths[3].with_suffix(".TIFF"))
    (tmp_path / "cells" / "._z1.tif").write_bytes(b"what macOS leaves on a stick")
    (tmp_path / "cells" / "notes.txt").write_text("no image")
    volume = open_volume(tmp_path / "cells")
    assert (volume.axes, volume.shape) == ("ZYX", array.shape)
    assert "12 files joined, from z0.tif to z11.tif" in volume.description
    np.testing.assert_array_equal(volume.read(), array)
    part = volume.read(z_slice=slice(2, 11), y_slice=slice(1, 4))
    np.testing.assert_array_equal(part, array[2:11, 1:4])
    assert open_volume(tmp_path / "cells", axes="TYX").axes == "TZYX"


def test_a_list_of_files_keeps_its_order(tmp_path):
    array = voxels((4, 6, 7))
    paths = write_slices(tmp_path, array, metadata={"axes": "YX"})
    np.testing.assert_array_equal(open_volume(paths[::-1]).read(), array[::-1])
    assert open_volume(paths[:1]).shape == (1, 6, 7)


def test_files_with_channels(tmp_path):
    array = voxels((5, 2, 6, 7))
    options = {"imagej": True, "metadata": {"axes": "CYX", "unit": "um"}}
    volume = open_volume(write_slices(tmp_path, array, **options))
    assert (volume.axes, volume.shape) == ("CZYX", (2, 5, 6, 7))
    assert volume.unit == "um"
    np.testing.assert_array_equal(volume.read(c=1), array[:, 1])


def test_files_that_can_not_be_joined(tmp_path):
    paths = write_slices(tmp_path, voxels((3, 6, 7)))
    tifffile.imwrite(paths[2], voxels((6, 8)), **GREY)
    message = "YX 6x7 uint16 in z0.tif and YX 6x8 uint16 in z2.tif"
    with pytest.raises(ValueError, match=message):
        open_volume(tmp_path)
    paths = write_slices(tmp_path, voxels((3, 2, 6, 7)), metadata={"axes": "ZYX"})
    with pytest.raises(ValueError, match="one slice each, got ZYX 2x6x7 uint16"):
        open_volume(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.tif does not exist"):
        open_volume(tmp_path / "none.tif")
    with pytest.raises(FileNotFoundError, match="none.tif does not exist"):
        open_volume([tmp_path / "none.tif"])
    with pytest.raises(ValueError, match="holds no file that ends in .tif"):
        open_volume(tmp_path)
    with pytest.raises(ValueError, match="at least one file"):
        open_volume([])


@pytest.mark.parametrize("channels, axes", [(1, "ZYX"), (2, "CZYX")])
def test_ome_of_several_files(tmp_path, channels, axes):
    array = voxels((4, 6, 7))
    paths = write_ome_set(
        tmp_path, array, ["b.tif", "a.tif", "d.tif", "c.tif"], channels
    )
    # By its metadata, not by name; from any of its files, or the folder.
    for source in (paths[0], paths[2], tmp_path):
        volume = open_volume(source)
        assert volume.axes == axes
        assert volume.voxel_size == (None, None, 0.5)
        parts = [volume.read(c=c) for c in range(channels)]
        np.testing.assert_array_equal(np.concatenate(parts), array)
    write_slices(tmp_path, array)
    with pytest.raises(ValueError, match="an OME set of 4 files"):
        open_volume(tmp_path)


def test_renamed_ome_of_several_files(tmp_path):
    array = voxels((3, 6, 7))
    paths = write_ome_set(tmp_path, array, ["a0.tif", "a1.tif", "a2.tif"])
    renamed = [path.rename(tmp_path / f"b{i}.tif") for i, path in enumerate(paths)]
    with pytest.raises(ValueError, match=r"b0.tif .*files a1.tif, a2.tif are missing"):
        open_volume(renamed[0])
    for source in (renamed, tmp_path):
        volume = open_volume(source)
        np.testing.assert_array_equal(volume.read(), array)
        assert volume.voxel_size == (None, None, 0.5)
        assert "order of the OME set is lost" in volume.description


def test_renamed_ome_of_several_channels_is_not_guessed(tmp_path):
    names = ["a0.tif", "a1.tif", "a2.tif", "a3.tif"]
    paths = write_ome_set(tmp_path, voxels((4, 6, 7)), names, channels=2)
    paths[1].rename(tmp_path / "b1.tif")
    with pytest.raises(ValueError, match="a1.tif are missing"):
        open_volume(tmp_path)


def test_ome_with_a_damaged_member(tmp_path):
    paths = write_ome_set(tmp_path, voxels((3, 40, 40)), ["a.tif", "b.tif", "c.tif"])
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        open_volume(paths[0])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"II", "is truncated"),
        (b"\x89PNG\r\n\x1a\n and more of that", "is no TIFF"),
        (b"II*\0" + bytes(20), "no image|damaged"),
        (b"II*\0\x08\0\0\0" + bytes(2) + b"\x08\0\0\0", "follows on itself"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    path = tmp_path / "in.tif"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_volume(path)
    assert str(path) in str(caught.value)


FORMS = {
    "plain": {"metadata": {"axes": "ZYX"}},
    "bare": {"metadata": None},
    "compressed": {"metadata": None, "compression": "zlib"},
    "imagej": {"imagej": True, "metadata": {"axes": "ZYX"}},
    "imagej compressed": {
        "imagej": True,
        "metadata": {"axes": "ZYX"},
        "compression": "lzw",
    },
    "ome": {"ome": True, "metadata": {"axes": "ZYX"}},
    "big": {"bigtiff": True, "metadata": None},
    "tiled": {"tile": (16, 16), "metadata": {"axes": "ZYX"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_truncated_file_is_refused(tmp_path, form):
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, voxels((5, 6, 7)), **GREY, **FORMS[form])
    assert open_volume(path).shape == (5, 6, 7)
    content = path.read_bytes()
    # tifffile leaves up to 16 bytes at the end that nothing in the file refers to.
    for length in range(0, len(content) - 16, 7):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="truncated|is empty|is no TIFF"):
            open_volume(path)


def test_our_own_file_truncated(tmp_path):
    path = tmp_path / "in.tif"
    with VolumeWriter(
        path, (2, 3, 6, 7), "CZYX", "uint16", compression="lzw"
    ) as writer:
        writer.append(voxels((3, 6, 7)))
        writer.append(voxels((3, 6, 7)))
    content = path.read_bytes()
    for length in range(8, len(content), 11):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="truncated"):
            open_volume(path)


@pytest.mark.parametrize(
    "description",
    [
        "ImageJ=1.54f\nimages=5\nslices=5\nhyperstack=true\n",
        '{"shape": [5, 6, 7]}',
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/'
        '2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" '
        'Type="uint16" SizeX="7" SizeY="6" SizeZ="5" SizeC="1" SizeT="1"><TiffData/>'
        "</Pixels></Image></OME>",
    ],
    ids=["imagej", "plain", "ome"],
)
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_fewer_pages_than_declared(tmp_path, description, compression):
    """Whole files, from which somebody's program has dropped pages."""
    path = tmp_path / "in.tif"
    options = {"description": description, "metadata": None, **GREY}
    for count in (3, 5):
        array = voxels((count, 6, 7))
        tifffile.imwrite(path, array, compression=compression, **options)
        if count == 5:
            np.testing.assert_array_equal(open_volume(path).read(), array)
        else:
            with pytest.raises(ValueError, match=r"in.tif .*(truncated|declares)"):
                open_volume(path)


def test_damaged_data_is_one_error_on_reading(tmp_path):
    path = tmp_path / "in.tif"
    options = {"compression": "zlib", "metadata": None, **GREY}
    tifffile.imwrite(path, voxels((3, 40, 50)), **options)
    volume = open_volume(path)
    offset, count = volume.planes[1].coded.segments[0]
    content = bytearray(path.read_bytes())
    content[offset : offset + count] = bytes(count)
    path.write_bytes(content)
    volume.read(z_slice=slice(1))
    with pytest.raises(ValueError, match="page 1 can't be decoded, it is damaged"):
        volume.read()


def test_random_damage_is_a_value_error_or_none(tmp_path):
    path = tmp_path / "in.tif"
    random = np.random.default_rng(0)
    for form in FORMS.values():
        tifffile.imwrite(path, voxels((4, 6, 7)), **GREY, **form)
        content = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(content)
            damaged[random.integers(len(content))] = random.integers(256)
            path.write_bytes(damaged)
            try:
                volume = open_volume(path)
                for t, c in volume.positions:
                    volume.read(t, c)
            except ValueError as error:
                assert "in.tif" in str(error)


def test_what_tifffile_remarks_is_a_note_and_not_printed(tmp_path, capfd):
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, voxels((3, 6, 7)), imagej=True, metadata={"axes": "ZYX"})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"slices=3", b"slices=2"))
    with pytest.raises(ValueError, match="declares 3 planes, and 2"):
        open_volume(path)
    # An invalid offset in a private tag, which nobody needs.
    options = {"extratags": [(65000, 2, 0, "some text", True)], **GREY}
    tifffile.imwrite(path, voxels((3, 6, 7)), **options)
    with tifffile.TiffFile(path) as file:
        entry = file.pages.first.tags[65000].offset
    damaged = bytearray(path.read_bytes())
    damaged[entry + 8 : entry + 12] = b"\xff\xff\xff\x7f"
    path.write_bytes(damaged)
    volume = open_volume(path)
    assert "tifffile says: " in volume.description
    assert volume.shape == (3, 6, 7)
    assert capfd.readouterr() == ("", "")


def test_reading_takes_memory_for_what_is_read(tmp_path):
    # 133 MB, as in a user's report, most of it a hole in the file.
    path = tmp_path / "in.tif"
    shape = (133, 1000, 500)
    tifffile.imwrite(path, shape=shape, dtype="uint16", metadata=None, **GREY)
    tracemalloc.start()
    volume = open_volume(path)
    part = volume.read(z_slice=slice(60, 62), y_slice=slice(10, 900))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.shape == (2, 890, 500)
    assert peak < part.nbytes + 1e6


@pytest.mark.parametrize("mapped", [0, 100, 10_000])
def test_maps_are_renewed(tmp_path, monkeypatch, mapped):
    monkeypatch.setattr(tiff_planes, "MAPPED_BYTES", mapped)
    array = voxels((9, 6, 7))
    tifffile.imwrite(tmp_path / "in.tif", array, **GREY)
    np.testing.assert_array_equal(open_volume(tmp_path / "in.tif").read(), array)


def test_parts_beyond_the_volume_and_wrong_parts(tmp_path):
    path = tmp_path / "in.tif"
    array = voxels((3, 6, 7))
    tifffile.imwrite(path, array, **GREY)
    volume = open_volume(path)
    part = volume.read(0, 0, slice(2, 99), slice(-3, None), slice(5, 99))
    np.testing.assert_array_equal(part, array[2:, -3:, 5:])
    assert volume.read(z_slice=slice(2, 1)).shape == (0, 6, 7)
    with pytest.raises(IndexError, match="c must be from 0 to 0, got 1"):
        volume.read(0, 1)
    with pytest.raises(IndexError, match="t must be from 0 to 0, got -1"):
        volume.read(-1)
    with pytest.raises(ValueError, match="slices must have step 1"):
        volume.read(z_slice=slice(0, 3, 2))


@pytest.mark.parametrize("order", [b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"])
def test_the_first_bytes_of_a_tiff_are_a_truncated_one(tmp_path, order):
    path = tmp_path / "in.tif"
    for size in (2, 3, 4, 7):
        path.write_bytes((order + bytes([8, 0, 0]))[:size])
        with pytest.raises(ValueError, match=f"in.tif is truncated: .* {size}"):
            open_volume(path)
    path.write_bytes(b"IIxx")
    with pytest.raises(ValueError, match="is no TIFF"):
        open_volume(path)


def test_files_of_an_ome_set_with_other_names(tmp_path):
    """What is told can be done, in Python and on the command line."""
    array = voxels((4, 6, 7))
    one = write_ome_set(tmp_path, array, ["a.tif", "b.tif", "c.tif", "d.tif"])
    for path in one:
        path.rename(path.with_name(f"new_{path.name}"))
    message = (
        r"files b.tif, c.tif, .* missing: .* into a folder with nothing else and give"
    )
    with pytest.raises(ValueError, match=message):
        open_volume(tmp_path / "new_a.tif")
    np.testing.assert_array_equal(open_volume(tmp_path).read(), array)
    folder = tmp_path / "channels"
    folder.mkdir()
    two = write_ome_set(folder, array, ["a.tif", "b.tif", "c.tif", "d.tif"], channels=2)
    for path in two:
        path.rename(path.with_name(f"new_{path.name}"))
    for source in (folder, folder / "new_a.tif"):
        with pytest.raises(ValueError, match="give the files these names again$"):
            open_volume(source)


def test_axes_without_a_name_tell_how_to_name_them(tmp_path):
    tifffile.imwrite(tmp_path / "in.tif", voxels((3, 6, 7)), **GREY, metadata=None)
    told = open_volume(tmp_path / "in.tif").description
    for axes in ("TYX", "CYX"):
        assert f"--axes {axes} (in Python axes='{axes}')" in told
        assert "has no name" not in open_volume(tmp_path / "in.tif", axes=axes).notes
    tifffile.imwrite(
        tmp_path / "in.tif", voxels((2, 3, 6, 7)), **GREY, metadata={"axes": "TQYX"}
    )
    told = open_volume(tmp_path / "in.tif").description
    assert "--axes TCYX" in told
    assert "TTYX" not in told
