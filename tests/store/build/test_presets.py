"""Corpora that every machine has are found, and nothing else with them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from hf_refspec.apps.cli.main import main
from hf_refspec.store.build import presets
from hf_refspec.store.build.presets import PRESETS, python_stdlib


def test_the_standard_library_is_found_whole():
    files = python_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    names = {file.relative_to(root).as_posix() for file in files}
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert len(files) == len(set(files)) > 400
    assert files == sorted(files)
    assert all(file.is_file() and file.suffix == ".py" for file in files)


def test_installed_packages_are_no_part_of_it(tmp_path, monkeypatch):
    ours = ["os.py", "json/decoder.py", "test/test_os.py"]
    theirs = ["site-packages/a.py", "dist-packages/b/c.py", "x/site-packages/d.py", "lib.so"]
    for name in (*ours, *theirs):
        path = tmp_path / "site-packages" / "python" / name  # its own place does not count
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    root = tmp_path / "site-packages" / "python"
    monkeypatch.setattr(presets.sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    assert [file.relative_to(root).as_posix() for file in python_stdlib()] == sorted(ours)


def test_the_command_line_offers_each_preset(capsys):
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    offered = capsys.readouterr().out
    for name, (files, corpus, license) in PRESETS.items():
        assert name in offered
        assert callable(files) and corpus and license
