"""Enlarging from TIFF to TIFF: voxels, types, geometry, and what people are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile

from models import EDSR3D, UNet3D, save
from train import memory, upscale_run
from train.data.tiff import Volume, VolumeWriter, open_volume, to_dtype
from train.normalise import IntensityRange
from train.tile_network import TileNetwork
from train.upscale import main
from train.upscale_work import key_of

SCALE = (1, 2, 2)


def shapes_of(model):
    x = jnp.zeros(model.example_shape())
    return jax.eval_shape(lambda: model.init(jax.random.key(0), x))


def zeros(model):
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes_of(model)
    )


def drawn(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype),
        shapes_of(model),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Files of a network that returns its input, and of one that enlarges planes."""
    folder = tmp_path_factory.mktemp("models")
    same = UNet3D(hidden_channels=1, n_levels=1)
    finer = EDSR3D(hidden_channels=2, n_blocks=1, scale=SCALE, input_skip="linear")
    save(
        folder / "same.safetensors", same, zeros(same), intensity={"low": 0, "high": 1}
    )
    ranges = {"intensity": {"low": 10, "high": 20}}
    ranges["target_intensity"] = {"low": 1000, "high": 4000}
    save(folder / "brighter.safetensors", same, zeros(same), **ranges)
    save(folder / "finer.safetensors", finer, drawn(finer), percentiles=(0.0, 100.0))
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """Several windows a volume, and programs that are compiled once for all runs."""
    programs, share = {}, memory.Budget.share

    def create(self, model, variables, depth=None):
        create_alone(self, model, variables, depth)
        self._programs = programs.setdefault((self.model, depth), {})

    def limited(self, need):
        return max(share(self, need), need.largest / 30_000)

    create_alone = TileNetwork.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileNetwork, "__init__", create)
        patch.setattr(TileNetwork, "keep_only", lambda self, window: None)
        patch.setattr(memory.Budget, "share", limited)
        yield


def run(models, name, source, out, *options):
    return main([str(models / f"{name}.safetensors"), str(source), str(out), *options])


def voxels(shape, dtype="uint16", seed=0):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.kind == "f":
        values = rng.random(shape)
        values.flat[:2] = 0, 1
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def write(path, array, axes="ZYX", **options):
    with VolumeWriter(path, array.shape, axes, array.dtype, **options) as writer:
        for part in array.reshape(-1, *array.shape[-3:]):
            writer.append(part)
    return path


@pytest.mark.parametrize("normalise", ["input", "model"])
def test_pairs_of_other_intensities_give_these_to_the_output(
    models, tmp_path, normalise
):
    """Trained where 10 to 20 became 1000 to 4000: 300 times as much, and less 2000."""
    array = np.random.default_rng(3).integers(11, 31, (4, 17, 18)).astype(np.uint16)
    source, out = write(tmp_path / "in.tif", array), tmp_path / "out.tif"
    assert run(models, "brighter", source, out, "--normalise", normalise) == 0
    result = tifffile.imread(out).astype(int)
    np.testing.assert_allclose(result, 300 * array.astype(int) - 2000, atol=1)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize(
    ("axes", "shape"), [("ZYX", (9, 41, 43)), ("TCZYX", (2, 2, 3, 20, 17))]
)
def test_an_identity_gives_back_its_input(models, tmp_path, dtype, axes, shape):
    array = voxels(shape, dtype)
    source = write(tmp_path / "in.tif", array, axes)
    out = tmp_path / "out.tif"
    # The intensities of random floats are no fractions that floats hold exactly.
    normalise = "model" if dtype == "float32" else "input"
    assert run(models, "same", source, out, "--normalise", normalise) == 0
    with tifffile.TiffFile(out) as file:
        (series,) = file.series
        result = series.asarray()
        assert series.axes == {"ZYX": "ZYX", "TCZYX": "TZCYX"}[axes]
    if axes == "TCZYX":
        result = result.swapaxes(1, 2)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, array)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.tif", "out.tif"]


def test_the_output_is_that_of_the_whole_volume_in_the_units_of_the_input(
    models, tmp_path, capsys
):
    array = voxels((2, 2, 3, 37, 50), seed=1) // 4
    array[:, 1] //= 2
    source = write(tmp_path / "in.tif", array, "TCZYX")
    assert run(models, "finer", source, tmp_path / "out.tif", "--check") == 0
    result = open_volume(tmp_path / "out.tif")
    model, variables, _ = upscale_load(models / "finer.safetensors")
    network = TileNetwork(model, variables, array.shape[-3])
    total = 0
    for t, c in result.positions:
        intensity = IntensityRange.fit([array[:, c]], (0.0, 100.0))
        encoded = intensity.encode(array[t, c])
        expected, clipped = to_dtype(intensity.decode(network(encoded)), "uint16")
        total += clipped
        difference = result.read(t, c).astype(int) - expected.astype(int)
        assert np.abs(difference).max() <= 1  # rounding of interpolation, then to 1
        assert (difference != 0).mean() < 1e-3
    told = capsys.readouterr().out
    assert "2 windows of" in told or "windows of 3 x" in told
    assert f"note     {total:,} of {result.read().size * 4:,} voxels" in told
    assert total > 0
    check = told.split("by at most ")[1].split()[0]
    assert float(check) < 1e-6


def test_a_shallow_volume_is_cut_along_the_depth_where_memory_is_scarce(
    models, tmp_path, capsys, monkeypatch
):
    source = write(tmp_path / "in.tif", voxels((20, 14, 15)))
    monkeypatch.setattr(memory.Budget, "share", lambda _, need: need.largest / 40_000)
    assert run(models, "finer", source, tmp_path / "out.tif", "--check") == 0
    told = capsys.readouterr().out
    window = told.split(" windows of ")[1].split(" a volume")[0].split(" x ")
    assert 13 <= int(window[0]) < 20


def upscale_load(path):
    from models import load

    return load(path)


def test_one_range_a_channel_for_all_times_is_saved_with_the_output(models, tmp_path):
    array = np.stack([voxels((4, 16, 16), seed=i) // 2 ** (3 * i) for i in range(2)])
    source = write(tmp_path / "in.tif", np.stack([array, array // 2]), "TCZYX")
    assert run(models, "finer", source, tmp_path / "out.tif") == 0
    made = open_volume(tmp_path / "out.tif").provenance
    assert made["command"] == "train.upscale"
    assert made["scale"] == [1, 2, 2]
    ranges = [(r["low"], r["high"]) for r in made["intensity"]]
    both = [np.stack([array[c], array[c] // 2]) for c in range(2)]
    assert ranges == [(channel.min(), channel.max()) for channel in both]


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
def test_voxel_size_and_origin_are_those_of_the_finer_grid(models, tmp_path, name):
    source = write(
        tmp_path / name.replace("out", "in"),
        voxels((4, 10, 12)),
        voxel_size=(2.0, 0.5, 0.25),
        unit="um",
        origin=(10.0, 20.0, 30.0),
        compression="deflate",
    )
    out = tmp_path / name
    assert run(models, "finer", source, out) == 0
    with tifffile.TiffFile(out) as file:
        page = file.pages.first
        assert page.compression.name in ("ADOBE_DEFLATE", "DEFLATE")
        assert file.series[0].shape == (4, 20, 24)
        if name == "out.ome.tif":
            assert 'PhysicalSizeX="0.125"' in file.ome_metadata
            assert 'PhysicalSizeY="0.25"' in file.ome_metadata
            assert 'PhysicalSizeZ="2' in file.ome_metadata
        else:
            pixels, length = page.tags["XResolution"].value
            assert pixels / length == pytest.approx(8)
            assert file.imagej_metadata["spacing"] == 2
    volume = open_volume(out)
    assert volume.origin == pytest.approx((10, 20 - 0.125, 30 - 0.0625))


@pytest.mark.parametrize("may_keep", [True, False])
def test_compressed_planes_are_decoded_once_where_there_is_room(
    models, tmp_path, monkeypatch, may_keep
):
    array = voxels((9, 41, 43))
    source = write(tmp_path / "in.tif", array, compression="deflate")
    out, read, parts = tmp_path / "out.tif", Volume.read, []

    def counted(volume, *arguments, **slices):
        result = read(volume, *arguments, **slices)
        parts.append(result.shape)
        return result

    monkeypatch.setattr(Volume, "read", counted)
    if not may_keep:
        monkeypatch.setattr("train.upscale.SLAB_SHARE", 0)
    assert run(models, "same", source, out) == 0
    np.testing.assert_array_equal(tifffile.imread(out), array)
    # One read finds a missing codec, one fits the intensities.
    assert (len(parts) == 3) is may_keep


@pytest.mark.parametrize("compression", ["lzw", "none"])
def test_compression_can_be_chosen(models, tmp_path, compression):
    source = write(tmp_path / "in.tif", voxels((3, 8, 8)), compression="deflate")
    out = tmp_path / "out.tif"
    assert run(models, "same", source, out, "--compression", compression) == 0
    assert open_volume(out).source.compression == compression


def test_negative_values_into_unsigned_ones_are_clipped_and_counted(
    models, tmp_path, capsys
):
    array = voxels((3, 8, 9), "int16")
    source = write(tmp_path / "in.tif", array)
    assert run(models, "same", source, tmp_path / "out.tif", "--dtype", "uint16") == 0
    number = np.count_nonzero(array < 0)
    assert f"{number} of 216 voxels" in capsys.readouterr().out
    np.testing.assert_array_equal(
        tifffile.imread(tmp_path / "out.tif"), array.clip(0).astype(np.uint16)
    )


def test_nan_spoils_nothing_and_is_told(models, tmp_path, capsys):
    array = voxels((3, 40, 41), "float32")
    array[1, 4, 5], array[2, 20, 20], array[0, 39, 40] = np.nan, np.inf, -np.inf
    source = write(tmp_path / "in.tif", array)
    out = tmp_path / "out.tif"
    assert run(models, "same", source, out, "--normalise", "model") == 0
    expected = np.where(np.isfinite(array), array, 0)
    np.testing.assert_array_equal(tifffile.imread(out), expected)
    assert "3 voxels of the input are NaN or infinite" in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, 7])
def test_a_constant_volume_stays_constant(models, tmp_path, value):
    source = write(tmp_path / "in.tif", np.full((2, 9, 9), value, np.uint8))
    assert run(models, "same", source, tmp_path / "out.tif") == 0
    assert (tifffile.imread(tmp_path / "out.tif") == value).all()


def test_big_endian_slices_in_a_folder(models, tmp_path):
    array = voxels((11, 16, 16))
    folder = tmp_path / "slices"
    folder.mkdir()
    for z, plane in enumerate(array):
        tifffile.imwrite(folder / f"z{z}.tif", plane, byteorder=">")
    out = tmp_path / "out.tif"
    assert run(models, "same", folder, out) == 0
    np.testing.assert_array_equal(tifffile.imread(out), array)


@pytest.mark.parametrize("shape", [(1, 5, 7), (1, 1, 1), (5, 16, 16), (2, 3, 90)])
def test_small_and_flat_volumes(models, tmp_path, shape):
    array = voxels(shape)
    source = write(tmp_path / "in.tif", array)
    assert run(models, "finer", source, tmp_path / "out.tif", "--check") == 0
    finer = tuple(n * s for n, s in zip(shape, SCALE, strict=True))
    assert open_volume(tmp_path / "out.tif").shape == finer


def test_types_that_tiff_programs_lack(models, tmp_path, capsys):
    array = voxels((2, 8, 8), "float32").astype(np.float16)
    tifffile.imwrite(tmp_path / "in.tif", array, photometric="minisblack")
    assert run(models, "same", tmp_path / "in.tif", tmp_path / "out.tif") == 0
    assert "float32: TIFF programs know no float16" in capsys.readouterr().out
    result = tifffile.imread(tmp_path / "out.tif")
    np.testing.assert_allclose(result, array.astype(np.float32), atol=1e-6)


def test_running_out_of_memory_halves_the_windows_and_goes_on(
    models, tmp_path, capsys, monkeypatch
):
    source = write(tmp_path / "in.tif", voxels((3, 60, 90)))
    straight, out = tmp_path / "straight.tif", tmp_path / "out.tif"
    assert run(models, "same", source, straight) == 0
    capsys.readouterr()
    call, sizes = TileNetwork.__call__, []

    def failing(self, window, means=None):
        sizes.append(window.size)
        if len(sizes) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")
        return call(self, window, means)

    monkeypatch.setattr(TileNetwork, "__call__", failing)
    assert run(models, "same", source, out) == 0
    assert "the device ran out of it: going on with" in capsys.readouterr().out
    assert max(sizes[3:]) < min(sizes[:3])
    assert out.read_bytes() == straight.read_bytes()


def test_running_out_of_memory_with_the_smallest_window_is_told(
    models, tmp_path, capsys, monkeypatch
):
    def failing(self, window, means=None):
        raise MemoryError

    monkeypatch.setattr(TileNetwork, "__call__", failing)
    source = write(tmp_path / "in.tif", voxels((1, 30, 3)))
    assert run(models, "same", source, tmp_path / "out.tif") == 2
    assert "too small for the smallest window" in capsys.readouterr().err
    assert not (tmp_path / "out.tif").exists()


def refused(capsys, models, name, source, out, *options):
    """What is told; nothing is left behind or changed."""
    folder = out.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert run(models, name, source, out, *options) == 2
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    return told


def test_mistakes_are_told_and_lose_nothing(models, tmp_path, capsys):
    source = write(tmp_path / "in.tif", voxels((3, 8, 8)))
    out = tmp_path / "out.tif"
    colour = tmp_path / "colour.tif"
    tifffile.imwrite(colour, np.zeros((8, 8, 3), np.uint8), photometric="rgb")
    cut = tmp_path / "cut.tif"
    cut.write_bytes(source.read_bytes()[:-50])
    taken = write(tmp_path / "taken.tif", voxels((1, 4, 4)))
    folder = tmp_path / "slices"
    folder.mkdir()
    write(folder / "z.tif", voxels((1, 4, 4)))

    def told(path, result=out, *options, name="same"):
        return refused(capsys, models, name, path, result, *options)

    assert "does not exist" in told(tmp_path / "no.tif")
    assert "does not exist. Give a model" in told(source, name="none")
    assert "RGB" in told(colour) or "colour" in told(colour)
    assert "truncated" in told(cut)
    assert "is there. Replace it with --overwrite" in told(source, taken)
    assert "must not be a file that is read" in told(source, source, "--overwrite")
    assert "must not lie in the folder" in told(folder, folder / "out.tif")
    assert "must end in .tif" in told(source, tmp_path / "out.png")
    assert "a size with a unit" in told(source, out, "--memory", "much")
    assert "axes" in told(source, out, "--axes", "QQ")
    assert "series" in told(source, out, "--series", "3")
    assert "must be at least" in told(source, out, "--memory", "1MB")
    assert "needs the intensities" in told(
        source, out, "--normalise", "model", name="finer"
    )


def test_the_least_budget_that_is_told_is_enough(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "resident_memory", lambda: 300_000_000)
    source = write(tmp_path / "in.tif", voxels((3, 8, 8)))
    out = tmp_path / "out.tif"
    told = refused(capsys, models, "same", source, out, "--memory", "1MB")
    least = told.split("at least ")[1].split(" for this")[0]
    assert run(models, "same", source, out, "--memory", least) == 0


def test_a_full_disk_is_told_before_the_work(models, tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "in.tif", voxels((3, 8, 8)))

    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    told = refused(capsys, models, "same", source, tmp_path / "out.tif")
    assert "must have 0.768 kB free" in told


def test_tiles_that_differ_from_the_whole_are_an_error(
    models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        upscale_run, "run_tiled", lambda network, tiling, x: x + np.float32(1)
    )
    source = write(tmp_path / "in.tif", voxels((3, 60, 60)))
    assert run(models, "same", source, tmp_path / "out.tif", "--check") == 2
    assert "tiles must equal the whole" in capsys.readouterr().err


def test_the_key_of_work_is_of_contents_and_options(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"1")
    key = key_of(file, [str(file)], axes="ZYX")
    assert key != key_of(file, [str(file)], axes="TZYX")
    file.write_bytes(b"22")
    assert key != key_of(file, [str(file)], axes="ZYX")
