"""How the sources of other packages' tests are found and opened, without the network."""

from __future__ import annotations

import importlib
import io
import tarfile

import pytest

from tests.others_suites.sources import SourceMissingError, fetch, open_tests, unpacked

VERSION = importlib.metadata.version("packaging")
FILES = {
    "tests/one.py": "from .deep.two import NUMBER\nfrom .three import OTHER\n",
    "tests/three.py": "OTHER = 5\n",
}


@pytest.fixture
def cache(tmp_path):
    with tarfile.open(tmp_path / f"packaging-{VERSION}.tar.gz", "w:gz") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"packaging-{VERSION}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return tmp_path


def test_an_archive_is_unpacked_and_opened_with_stand_ins(cache):
    folder = fetch("packaging", cache=cache)
    assert folder == unpacked("packaging", cache=cache) == cache / f"packaging-{VERSION}"
    name = open_tests("packaging", stand_ins={"deep.two": {"NUMBER": 3}}, cache=cache)
    one = importlib.import_module(f"{name}.one")
    assert (one.NUMBER, one.OTHER) == (3, 5)


def test_a_source_that_is_not_there_says_what_would_fetch_it(tmp_path):
    with pytest.raises(SourceMissingError, match=r"run `python -m tests\.others_suites\.sources packaging`"):
        open_tests("packaging", "nowhere", cache=tmp_path)
    with pytest.raises(SourceMissingError, match="no-such-package is not installed"):
        fetch("no-such-package", cache=tmp_path)


def test_an_archive_that_leaves_its_folder_is_refused(tmp_path):
    with tarfile.open(tmp_path / f"packaging-{VERSION}.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    with pytest.raises(tarfile.TarError):
        fetch("packaging", cache=tmp_path)
    assert not (tmp_path.parent / "outside").exists()
