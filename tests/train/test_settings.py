"""Settings go through JSON unchanged, and only settings come back."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from train import settings
from train.fno_settings import FNOSettings, ModelSettings, ReadSettings

CHANGED = FNOSettings(
    data=Path("/data/pairs.npz"),
    test=(Path("/data/a.npz"), Path("/data/b.npz")),
    gradient_clip=1.0,
    model=ModelSettings(n_modes=(4, 6), domain_padding=(0.5,)),
    read=ReadSettings(channel_axis=-1),
)


@pytest.mark.parametrize("values", [FNOSettings(), CHANGED])
def test_there_and_back(tmp_path, values):
    settings.write_settings(tmp_path / "config.json", values)
    assert settings.read_settings(tmp_path / "config.json", FNOSettings) == values


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"epochs": "7"}, "epochs can't be '7'"),
        ({"epochs": True}, "epochs can't be True"),
        ({"test": "a.npz"}, "test can't be 'a.npz'"),
        ({"loss": "l3"}, "loss can't be 'l3'"),
        ({"model": 3}, "model can't be 3"),
        ({"unknown": 3}, "lacks or does not know unknown"),
    ],
)
def test_a_file_that_was_changed_by_hand(tmp_path, change, told):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(settings.to_json(CHANGED)) | change))
    with pytest.raises(ValueError, match=f"(?s){path}.*{told}.*--overwrite"):
        settings.read_settings(path, FNOSettings)


def test_options_that_differ_are_told_by_their_flags():
    darcy = dataclasses.replace(FNOSettings().darcy, num_train=7)
    model = dataclasses.replace(CHANGED.model, n_layers=9)
    changed = dataclasses.replace(CHANGED, darcy=darcy, model=model, epochs=3)
    with pytest.raises(ValueError) as refused:
        settings.check_same(changed, CHANGED)
    flags = re.findall(r"(--\S+) was", str(refused.value))
    assert sorted(flags) == ["--darcy.num-train", "--epochs", "--n-layers"]
    elsewhere = dataclasses.replace(CHANGED, backend="gpu", out=Path("x"), resume=True)
    settings.check_same(elsewhere, CHANGED)
