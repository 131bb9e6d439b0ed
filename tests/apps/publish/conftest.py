from pathlib import Path
from zipfile import ZipFile

import pytest

METADATA = """\
Metadata-Version: 2.4
Name: hf_refspec
Version: 9.9
Requires-Dist: numba>=0.60
Requires-Dist: datasets; extra == "datastore"
Requires-Dist: gradio; extra == "space"
"""


@pytest.fixture
def wheel(tmp_path) -> Path:
    """A wheel of hf_refspec that has no files."""
    path = tmp_path / "hf_refspec-9.9-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("hf_refspec-9.9.dist-info/METADATA", METADATA)
    return path
