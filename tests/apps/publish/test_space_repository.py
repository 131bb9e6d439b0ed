"""`hf-refspec space --push` and `--out` write a Space that runs as it stands."""

import os
import socket
import subprocess
import sys
import urllib.request
from importlib.metadata import PathDistribution, version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from hf_refspec import __version__
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.publish import repositories
from hf_refspec.apps.publish.repositories import FROM_INDEX, package, space_repository
from tests.helpers.hub_server import TOKEN

pytest.importorskip("gradio")
REPO = "owner/page"
KINDS = {".py", ".md", ".css", ".typed"}


@pytest.mark.parametrize("private", [False, True])
def test_each_push_is_a_commit_that_replaces_the_files_of_a_space(
    hub, capsys, private, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    command = ["space", "--package", str(FROM_INDEX), "--push", REPO]
    assert main([*command, *["--private"] * private]) == 0
    assert main([*command, "--dtype", "bfloat16", "--model", "org/model"]) == 0
    assert capsys.readouterr().out == f"{hub.endpoint}/spaces/{REPO}\n" * 2
    repo = hub.repos[REPO]
    assert repo.sdk == "gradio" and repo.private == private and len(repo.commits) == 3
    expected = space_repository(REPO, "org/model", "bfloat16")
    assert {name: repo.files()[name] for name in expected} == expected
    assert b"serve(model='org/model', dtype='bfloat16')" in expected["app.py"]


def test_the_files_tell_the_hub_how_to_run_it():
    written = space_repository(REPO, datastore="org/store")
    torch = version("torch").partition("+")[0]
    assert written["requirements.txt"].decode().splitlines()[1:] == [
        "--extra-index-url https://download.pytorch.org/whl/cpu",
        f"torch=={torch}",
        f"transformers=={version('transformers')}",
        f"hf_refspec[space]=={__version__}",
    ]
    _, metadata, text = written["README.md"].decode().split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert about["sdk"] == "gradio" and about["sdk_version"] == version("gradio")
    assert about["python_version"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert about["app_file"] == "app.py" and about["license"] == "apache-2.0"
    assert about["models"] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert about["datasets"] == ["org/store"] and about["title"] == "page"
    assert len(about["short_description"]) <= 60  # the Hub takes no more
    assert text.strip().startswith("# page") and "| Datastore | org/store |" in text


def test_a_wheel_is_copied_and_installed_by_the_app_and_a_requirement_gets_the_extra(wheel):
    written = space_repository(REPO, package=wheel)
    assert written[wheel.name] == wheel.read_bytes()
    assert written["requirements.txt"].endswith(b"\nnumba>=0.60\ngradio\n")
    assert f'Path(__file__).with_name("{wheel.name}")' in written["app.py"].decode()
    with package("hf_refspec @ git+https://host/repository") as requirement:
        requirements = space_repository(REPO, package=requirement)["requirements.txt"].decode()
    assert requirements.endswith("\nhf_refspec[space] @ git+https://host/repository\n")


def test_an_installation_whose_origin_is_gone_asks_for_a_package(monkeypatch, capsys):
    monkeypatch.setattr(repositories, "__file__", "/site/hf_refspec/apps/publish/repositories.py")
    monkeypatch.setattr(PathDistribution, "read_text", lambda *_: '{"url": "file:///gone/it.whl"}')
    assert main(["space", "--out", "nowhere"]) == 2
    assert "/gone/it.whl, from which hf_refspec was installed, is gone" in capsys.readouterr().err


def test_an_installation_knows_its_wheel_and_one_of_an_index_its_release(wheel, monkeypatch):
    monkeypatch.setattr(repositories, "__file__", "/site/hf_refspec/apps/publish/repositories.py")
    for text, expected in ((f'{{"url": "{wheel.as_uri()}"}}', wheel), (None, FROM_INDEX)):
        monkeypatch.setattr(PathDistribution, "read_text", lambda *_, text=text: text)
        with package(None) as found:
            assert found == expected


@pytest.mark.nightly
def test_the_written_folder_holds_this_package_and_serves_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # no download: setuptools is here
    folder, installed = tmp_path / "page", tmp_path / "installed"
    assert main(["space", "--out", str(folder)]) == 0
    (wheel,) = folder.glob("*.whl")
    assert wheel.name in (folder / "requirements.txt").read_text()
    with ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if "-info/" not in name}
    root = Path(repositories.__file__).parents[3]
    sources = (path for path in (root / "hf_refspec").rglob("*.*") if path.suffix in KINDS)
    assert packed == {path.relative_to(root).as_posix(): path.read_bytes() for path in sources}
    assert main(["space", "--out", str(folder)]) == 2  # it is not overwritten
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environment = {
        **os.environ,
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PIP_TARGET": str(installed),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(folder / "app.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as app:
        try:
            assert app.stdout.readline() == f"http://127.0.0.1:{port}/ (Ctrl-C ends it)\n"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
                page = answer.read().decode()
            assert '"title":"hf_refspec"' in page and "Document" in page
            assert (installed / "hf_refspec" / "py.typed").exists()
        finally:
            app.terminate()
