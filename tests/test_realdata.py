"""The helper that fetches published data: fetched once, checked always."""

import subprocess

import pytest
import realdata


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder of its own, and a record of pip's calls."""
    monkeypatch.setenv("JAXOPS_CACHE", str(tmp_path))
    calls = []
    run = subprocess.run

    def recorded(command, **options):
        calls.append(command)
        return run(command, **options)

    monkeypatch.setattr(realdata.subprocess, "run", recorded)
    return tmp_path, calls


def test_fetched_once_and_checked_always(cache):
    folder, calls = cache
    paths = realdata.darcy_files()
    assert paths.keys() == realdata.FILES.keys()
    assert realdata.darcy_files() == paths and len(calls) == 1
    kept = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert kept == sorted(
        realdata.FILES.values()
    )  # neither the wheel nor a part file stays
    paths["test16"].write_bytes(b"other")
    with pytest.raises(ValueError, match="darcy_test_16.pt is not the published file"):
        realdata.darcy_files()


def test_a_skip_or_an_error_where_it_cannot_be_fetched(cache, monkeypatch):
    monkeypatch.setattr(realdata, "REQUIREMENT", "neuraloperator==0.0.0")
    with pytest.raises(pytest.skip.Exception, match="could not be downloaded: ERROR"):
        realdata.darcy_files()
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with pytest.raises(realdata.DownloadError, match="0.0.0 could not be downloaded"):
        realdata.darcy_files()
