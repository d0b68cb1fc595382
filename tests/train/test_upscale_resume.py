"""Work that is stopped or killed: nothing looks finished, and it goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import EDSR3D, RCAN3D, save
from train import memory, upscale
from train.data.tiff import VolumeWriter
from train.tile_network import TileNetwork
from train.upscale import main
from train.upscale_work import Work, open_work

ROOT = Path(__file__).parents[2]
MODELS = {
    "plain": EDSR3D(hidden_channels=2, n_blocks=1, scale=(1, 2, 2)),
    "attentive": RCAN3D(hidden_channels=6, reduction=1, n_groups=1, n_blocks=2),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A volume of two times, networks, and their outputs, made without a stop."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    array = rng.integers(0, 60000, (2, 26, 40, 20), np.uint16)
    with VolumeWriter(folder / "in.tif", array.shape, "TZYX", "uint16") as writer:
        for part in array:
            writer.append(part)
    for name, model in MODELS.items():
        shapes = jax.eval_shape(
            lambda model=model: model.init(
                jax.random.key(0), jnp.zeros(model.example_shape())
            )
        )
        variables = jax.tree.map(
            lambda leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype),
            shapes,
        )
        save(folder / f"{name}.safetensors", model, variables)
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """Several windows a volume, and programs that are compiled once for all runs."""
    programs = {}

    def create(self, model, variables, depth=None):
        create_alone(self, model, variables, depth)
        self._programs = programs.setdefault((self.model, depth), {})

    create_alone = TileNetwork.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileNetwork, "__init__", create)
        patch.setattr(TileNetwork, "keep_only", lambda self, window: None)
        patch.setattr(memory.Budget, "share", lambda self, need: need.largest / 120_000)
        yield


@pytest.fixture(scope="module")
def expected(files, small_windows):
    """The bytes of each network's output, and how often its state is saved."""
    found, saved = {}, Work.save
    with pytest.MonkeyPatch.context() as patch:
        for name in MODELS:
            calls = []

            def counted(work, calls=calls):
                saved(work)
                calls.append(None)

            patch.setattr(Work, "save", counted)
            assert run(files, name, files / f"{name}.tif") == 0
            found[name] = (files / f"{name}.tif").read_bytes(), len(calls)
    return found


def run(files, name, out, *options, source="in.tif"):
    model = files / f"{name}.safetensors"
    return main([str(model), str(files / source), str(out), *options])


def visible(folder):
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


class Killed(BaseException):
    """Ends the program where it is raised, as a signal would."""


@pytest.mark.parametrize("name", MODELS)
def test_killed_after_any_tile_it_goes_on_to_the_same_bytes(
    files, expected, tmp_path, monkeypatch, name
):
    """Every fourth save of the state is followed by a death, until there is none."""
    content, num_steps = expected[name]
    assert num_steps > 5
    out, saved, calls, deaths = tmp_path / "out.tif", Work.save, [], 0

    def dying(work):
        saved(work)
        calls.append(None)
        if len(calls) % 4 == 2:
            raise Killed

    monkeypatch.setattr(Work, "save", dying)
    while not out.exists():
        try:
            assert run(files, name, out) == 0
        except Killed:
            deaths += 1
            assert visible(tmp_path) == []
    assert deaths >= num_steps // 4
    assert len(calls) == num_steps
    assert out.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out.tif"]


def test_killed_inside_a_tile_between_voxels_and_state(
    files, expected, tmp_path, monkeypatch
):
    """Voxels that no state speaks of are computed and counted again."""
    out, written, calls = tmp_path / "out.tif", Work.write, []

    def dying(work, *arguments):
        calls.append(None)
        written(work, *arguments)
        if len(calls) in (3, 50):
            raise Killed

    monkeypatch.setattr(Work, "write", dying)
    for _ in range(2):
        with pytest.raises(Killed):
            run(files, "plain", out)
    assert run(files, "plain", out) == 0
    assert out.read_bytes() == expected["plain"][0]


def test_killed_while_the_file_is_written_or_tidied_up(
    files, expected, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out.tif"

    def dying(*arguments, **more):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(VolumeWriter, "_finish", dying)
        with pytest.raises(Killed):
            run(files, "plain", out)
    assert visible(tmp_path) == []
    (tmp_path / ".out.tif.0123abcd.tmp").write_bytes(b"left by kill -9")
    with monkeypatch.context() as patch:
        patch.setattr(Work, "remove", dying)
        patch.setattr(TileNetwork, "__call__", dying)  # nothing is left to compute
        with pytest.raises(Killed):
            run(files, "plain", out)
    assert out.read_bytes() == expected["plain"][0]
    capsys.readouterr()
    assert run(files, "plain", out) == 0
    assert "is finished already" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.tif"]
    assert run(files, "plain", out) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_kill_9_in_a_process_of_its_own(files, expected, tmp_path):
    """A true death: no handler and no `finally` runs."""
    out = tmp_path / "out.tif"
    program = textwrap.dedent(
        """
        import os, sys
        from train import memory, upscale, upscale_work
        memory.Budget.share = lambda self, need: need.largest / 120_000
        written, calls = upscale_work.Work.write, []
        def dying(work, *arguments):
            written(work, *arguments)
            calls.append(None)
            if len(calls) == 20:
                os.kill(os.getpid(), 9)
        upscale_work.Work.write = dying
        sys.exit(upscale.main(sys.argv[1:]))
        """
    )
    names = (files / "plain.safetensors", files / "in.tif", out)
    command = [sys.executable, "-c", program, *map(str, names), "--backend", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert visible(tmp_path) == []
    assert run(files, "plain", out) == 0
    assert out.read_bytes() == expected["plain"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["out.tif"]


def test_work_of_something_else_is_never_mixed_in(
    files, expected, tmp_path, monkeypatch, capsys
):
    out, saved = tmp_path / "out.tif", Work.save

    def dying(work):
        saved(work)
        if work.state.tiles == 1:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Work, "save", dying)
        with pytest.raises(Killed):
            run(files, "plain", out, "--dtype", "float32")
    before = contents(tmp_path)
    capsys.readouterr()
    assert run(files, "plain", out) == 2
    told = capsys.readouterr().err
    assert "the unfinished work of another command" in told
    assert "in.tif with" in told and "to float32" in told and "--overwrite" in told
    assert told.count("\n") == 1
    assert contents(tmp_path) == before
    assert run(files, "plain", out, "--overwrite") == 0
    assert "is removed" in capsys.readouterr().out
    assert out.read_bytes() == expected["plain"][0]


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def unfinished(files, expected, tmp_path_factory):
    """A folder with work in which some tiles of the second volume are done."""
    folder, saved = tmp_path_factory.mktemp("unfinished"), Work.save

    def dying(work):
        saved(work)
        if work.state.volume == 1 and work.state.tiles:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "save", dying)
        with pytest.raises(Killed):
            run(files, "plain", folder / "out.tif")
    return folder


def leaves(values, path=()):
    """Paths to all numbers, texts and empty values of a state."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def test_a_state_that_was_changed_is_refused(files, unfinished, tmp_path, capsys):
    """Whatever value it is, and whatever stands there then."""
    work = tmp_path / ".out.tif.upscale"
    shutil.copytree(unfinished / work.name, work)
    state = work / "state.json"
    content = state.read_bytes()
    paths = list(leaves(json.loads(content)))
    places = {path[-1] for path in paths}
    assert places >= {"volume", "tiles", "passes", "low", "clipped", "digest", 0}
    replaced = []
    for path in [*paths, ("state", "window"), ("state", "ranges")]:
        for value in (999, "abc", None, [], -1, 1e400):
            tree = json.loads(content)
            node = tree
            for key in path[:-1]:
                node = node[key]
            if node[path[-1]] != value:
                node[path[-1]] = value
                replaced.append(json.dumps(tree).encode())
    replaced += [b"", b"[]", b"7", b"{}", b"\xff\xfe", b"[" * 10**5, content[:-1]]
    message = "must be what this version.*--overwrite"
    for changed in replaced:
        state.write_bytes(changed)
        opened = open_work(tmp_path / "out.tif", "key", (2, 3, 4, 5), "uint16")
        with pytest.raises(ValueError, match=message), opened:
            pass
        assert state.read_bytes() == changed
    capsys.readouterr()
    assert run(files, "plain", tmp_path / "out.tif") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_voxels_that_are_gone_or_cut_are_computed_anew(
    files, expected, unfinished, tmp_path, capsys, is_there
):
    work = tmp_path / ".out.tif.upscale"
    shutil.copytree(unfinished / work.name, work)
    if is_there:
        os.truncate(work / "voxels.raw", (work / "voxels.raw").stat().st_size - 1)
    else:
        (work / "voxels.raw").unlink()
    assert run(files, "plain", tmp_path / "out.tif") == 0
    assert "begins anew: " in capsys.readouterr().out
    assert (tmp_path / "out.tif").read_bytes() == expected["plain"][0]


def test_what_can_be_gone_on_with_is_told_and_no_more(
    files, unfinished, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out.tif"
    shutil.copytree(unfinished / ".out.tif.upscale", tmp_path / ".out.tif.upscale")

    def told(error):
        def failing(*arguments):
            raise error

        monkeypatch.setattr(TileNetwork, "__call__", failing)
        assert run(files, "plain", out) == 2
        return capsys.readouterr().err.splitlines()[1:]

    kept = f"What is done is kept in {tmp_path / '.out.tif.upscale'}"
    (hint,) = told(OSError("no space left"))
    assert hint == f"{kept}: the same command goes on from there."
    assert told(ValueError("not finite")) == [f"{kept}."]
    (tmp_path / "model.safetensors").write_bytes(b"7")
    assert run(tmp_path, "model", out, source=files / "in.tif") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run(tmp_path, "none", out, source=files / "in.tif") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_the_running_tile_and_says_how_to_go_on(
    files, expected, tmp_path, monkeypatch, capsys, number
):
    out, call, calls = tmp_path / "out.tif", TileNetwork.__call__, []

    def interrupted(self, *arguments):
        calls.append(None)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return call(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TileNetwork, "__call__", interrupted)
        assert run(files, "plain", out) == 130
    assert len(calls) == 2
    told = capsys.readouterr()
    assert "the same command goes on from there" in told.err
    assert visible(tmp_path) == []
    assert run(files, "plain", out) == 0
    assert "goes on from" in capsys.readouterr().out
    assert out.read_bytes() == expected["plain"][0]


def test_two_processes_do_not_make_one_output(files, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.tif"
    told = []

    def second(job, tiling, report):
        told.append(run(files, "plain", out))
        raise Killed

    monkeypatch.setattr(upscale, "run_tiles", second)
    with pytest.raises(Killed):
        run(files, "plain", out)
    assert told == [2]
    error = capsys.readouterr().err
    assert "made by one process at a time" in error
    assert error.count("\n") == 1


def test_other_windows_after_running_out_of_memory_and_a_death(
    files, expected, tmp_path, monkeypatch
):
    """Halved along the depth in the middle of a slab; slices that are done stay."""
    out, call, calls = tmp_path / "out.tif", TileNetwork.__call__, []

    def failing(self, *arguments):
        calls.append(None)
        if len(calls) == 4:  # the second tile of a slab
            raise RuntimeError("RESOURCE_EXHAUSTED")
        if len(calls) == 7:
            raise Killed
        return call(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TileNetwork, "__call__", failing)
        with pytest.raises(Killed):
            run(files, "plain", out)
    assert run(files, "plain", out) == 0
    assert out.read_bytes() == expected["plain"][0]
