"""Mistakes with files and options that cost nothing but a line: what is read stays."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile

from models import FNO, UNet3D, load, save
from train.data.tiff import VolumeWriter, open_volume
from train.tile_network import TileNetwork
from train.upscale import main

SHAPE = (3, 8, 8)


def zeros(model):
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros(model.example_shape()))
    )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    """The file of a network that returns its input."""
    path = tmp_path_factory.mktemp("models") / "same.safetensors"
    model = UNet3D(hidden_channels=1, n_levels=1)
    variables = zeros(model)
    save(path, model, variables, intensity={"low": 0, "high": 65535})
    return path


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    programs, create_alone = {}, TileNetwork.__init__

    def create(self, model, variables, depth=None):
        create_alone(self, model, variables, depth)
        self._programs = programs.setdefault(depth, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileNetwork, "__init__", create)
        patch.setattr(TileNetwork, "keep_only", lambda self, window: None)
        yield


def voxels(seed=0):
    return np.random.default_rng(seed).integers(0, 65536, SHAPE, np.uint16)


def write(path, array, axes="ZYX", **options):
    with VolumeWriter(path, array.shape, axes, array.dtype, **options) as writer:
        writer.append(array)
    return path


def write_ome_set(folder, array, names):
    """A file a slice, each with the same metadata."""
    data = "".join(
        f'<TiffData FirstZ="{i}" IFD="0" PlaneCount="1">'
        f'<UUID FileName="{name}">urn:uuid:{i}</UUID></TiffData>'
        for i, name in enumerate(names)
    )
    for i, name in enumerate(names):
        xml = (
            f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID='
            f'"urn:uuid:{i}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder='
            f'"XYZCT" Type="uint16" SizeX="8" SizeY="8" SizeZ="{len(names)}" SizeC="1" '
            f'SizeT="1">{data}</Pixels></Image></OME>'
        )
        tifffile.imwrite(folder / name, array[i], description=xml, metadata=None)
    return [folder / name for name in names]


def run(*arguments):
    return main([str(argument) for argument in arguments])


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(capsys, folder, *arguments):
    """What is told, in one line; nothing is left behind or changed."""
    before = contents(folder)
    capsys.readouterr()
    assert run(*arguments) == 2
    assert contents(folder) == before
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    return told


def test_another_file_of_an_ome_set_is_not_replaced(same, tmp_path, capsys):
    paths = write_ome_set(tmp_path, voxels(), ["a.tif", "b.tif", "c.tif"])
    told = refused(capsys, tmp_path, same, paths[0], paths[2], "--overwrite")
    assert f"OUT must not be a file that is read; {paths[2]} is" in told


@pytest.mark.parametrize("make_link", [os.symlink, os.link])
def test_what_a_link_in_the_input_shows_is_not_replaced(
    same, tmp_path, capsys, make_link
):
    folder = tmp_path / "slices"
    folder.mkdir()
    for z, plane in enumerate(voxels()):
        tifffile.imwrite(folder / f"z{z}.tif", plane)
    target = tmp_path / "elsewhere.tif"
    (folder / "z1.tif").rename(target)
    make_link(target, folder / "z1.tif")
    told = refused(capsys, tmp_path, same, folder, target, "--overwrite")
    assert "OUT must not be a file that is read" in told
    link = tmp_path / "link.tif"
    os.symlink(target, link)
    told = refused(capsys, tmp_path, same, folder, link, "--overwrite")
    assert "OUT must not be a file that is read" in told


def test_names_that_are_too_long_are_one_line(same, tmp_path, capsys):
    source = write(tmp_path / "in.tif", voxels())
    for length in (241, 255, 256, 5000):
        out = tmp_path / ("x" * (length - 4) + ".tif")
        told = refused(capsys, tmp_path, same, source, out)
        assert f"at most 240 bytes long; got one of {length}" in told
    assert run(same, source, tmp_path / ("x" * 236 + ".tif")) == 0
    deep = tmp_path / ("x" * 300) / "out.tif"
    refused(capsys, tmp_path, same, source, deep)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("percentiles", v) for v in (None, 7, "abc", (5,), (1, 2, 3), (1, "2"))],
        *[("percentiles", v) for v in ((9, 9), (-1, 50), (0, float("nan")))],
        *[("intensity", {"low": v, "high": 1}) for v in (None, "0", (1,), 1, 10**400)],
        *[("intensity", v) for v in ({"low": 0}, 7, "abc", (0, 1))],
        ("intensity", {"low": 0, "high": float("inf")}),
    ],
)
def test_what_a_model_says_of_intensities_is_checked(
    same, tmp_path, capsys, key, value
):
    model, variables, extra = load(same)
    file = tmp_path / "changed.safetensors"
    save(file, model, variables, **{**extra, key: value})
    source = write(tmp_path / "in.tif", voxels())
    for normalise in ("input", "model"):
        out = (tmp_path / "out.tif", "--normalise", normalise)
        told = refused(capsys, tmp_path, file, source, *out)
        assert f"{file} must have" in told
        assert f"'{key}'; got " in told


@pytest.mark.parametrize("text", ["0", "-1GB", "1", "0GB", "two", "10PB"])
def test_budgets_that_can_not_be(same, tmp_path, capsys, text):
    source = write(tmp_path / "in.tif", voxels())
    out = tmp_path / "out.tif"
    told = refused(capsys, tmp_path, same, source, out, f"--memory={text}")
    rule = "a size with a unit, such as 2GB or 800MB, above 0"
    if text == "10PB":
        rule = "at most what this machine has"
    assert f"--memory must be {rule}" in told
    assert f"got '{text}'" in told


@pytest.mark.parametrize(
    ("low", "high", "is_far"),
    [(0, 65535, False), (100, 9000, False), (1, 2, True), (60000, 65535, True)],
)
def test_intensities_that_the_network_never_saw_are_told(
    same, tmp_path, capsys, low, high, is_far
):
    model, variables, extra = load(same)
    extra["intensity"] = {"low": 0, "high": 20000}
    file = tmp_path / "model.safetensors"
    save(file, model, variables, **extra)
    array = np.random.default_rng(0).integers(low, high, SHAPE, np.uint16)
    source = write(tmp_path / "in.tif", array)
    out = (tmp_path / "out.tif", "--normalise")
    assert run(file, source, *out, "model") == 0
    told = capsys.readouterr().out
    assert ("far from those of the training data, 0 to 20000" in told) is is_far
    np.testing.assert_allclose(tifffile.imread(out[0]), array, atol=1)
    assert run(file, source, *out, "input", "--overwrite") == 0
    assert "training data" not in capsys.readouterr().out


@pytest.mark.parametrize("compression", ["none", "deflate"])
@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
def test_one_command_makes_the_same_bytes_again(same, tmp_path, compression, name):
    source = write(tmp_path / "in.tif", voxels(), unit="um", voxel_size=(2, 1, 1))
    found = []
    for _ in range(2):
        options = ("--compression", compression, "--overwrite")
        assert run(same, source, tmp_path / name, *options) == 0
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
    assert run(same, source, tmp_path / name, "--dtype", "float32", "--overwrite") == 0
    if name == "out.ome.tif":
        assert b"urn:uuid:" in found[0]
        other = (tmp_path / name).read_bytes()
        uuids = [text.split(b"urn:uuid:")[1][:36] for text in (found[0], other)]
        assert uuids[0] != uuids[1]
    assert open_volume(tmp_path / name).provenance["command"] == "train.upscale"


def test_one_voxel_is_told_as_one(same, tmp_path, capsys):
    array = voxels().astype(np.float32)
    array[0, 0, 0] = np.nan
    array[0, 0, 1] = -9e4
    source = write(tmp_path / "in.tif", array)
    options = ("--dtype", "uint16", "--normalise", "model")
    assert run(same, source, tmp_path / "out.tif", *options) == 0
    told = capsys.readouterr().out
    assert "1 voxel of the input is NaN or infinite" in told
    assert "1 of 192 voxels (0.52%) was beyond uint16 and is clipped" in told


def test_other_models_are_refused(tmp_path, capsys):
    source = write(tmp_path / "in.tif", voxels())
    two = UNet3D(in_channels=2, out_channels=2, hidden_channels=1, n_levels=1)
    operator = FNO((2, 2), 1, 1, 2, n_layers=1)
    save(tmp_path / "two.safetensors", two, zeros(two))
    x = jnp.zeros((1, 4, 4, 1))
    shapes = jax.eval_shape(lambda: operator.init(jax.random.key(0), x))
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    save(tmp_path / "fno.safetensors", operator, variables)
    out = tmp_path / "out.tif"
    told = refused(capsys, tmp_path, tmp_path / "two.safetensors", source, out)
    assert "must take and give one channel" in told
    told = refused(capsys, tmp_path, tmp_path / "fno.safetensors", source, out)
    assert "python -m train.predict" in told


def test_weights_that_are_not_finite_are_found(same, tmp_path, capsys):
    model, variables, extra = load(same)
    broken = jax.tree.map(lambda leaf: leaf + jnp.nan, variables)
    save(tmp_path / "nan.safetensors", model, broken, **extra)
    source = write(tmp_path / "in.tif", voxels())
    # No word of going on, since that can't be.
    out = tmp_path / "out.tif"
    told = refused(capsys, tmp_path, tmp_path / "nan.safetensors", source, out)
    assert "must be finite; 64 voxels of a plane of 64 are not" in told


@pytest.mark.parametrize("error", [OSError, ValueError, MemoryError])
def test_an_error_before_the_first_tile_leaves_nothing(
    same, tmp_path, capsys, monkeypatch, error
):
    def failing(*arguments):
        raise error("no")

    monkeypatch.setattr(TileNetwork, "__call__", failing)
    source = write(tmp_path / "in.tif", voxels())
    refused(capsys, tmp_path, same, source, tmp_path / "out.tif")
    assert [path.name for path in tmp_path.iterdir()] == ["in.tif"]
