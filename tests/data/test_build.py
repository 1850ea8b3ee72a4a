"""Corpora from small packages that are made here; nothing is downloaded."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from loopformers.data import build
from loopformers.data.build import DEFAULT_PACKAGES, RECIPES, build_corpus, recipe_of
from loopformers.data.corpora import load_documents
from loopformers.data.package_formats import FORMATS
from loopformers.data.stream_sources import stream_documents
from loopformers.errors import ConfigError, DataError

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="packages are made and read with dpkg-deb")

PAGE = "<html><body><h1>{0}</h1><p>A page about {0}, long enough to be prose.</p></body></html>"


@pytest.fixture
def make_deb(tmp_path):
    def make(name, files, *, version="1.0-1", depends=""):
        root = tmp_path / f"tree-{name}"
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: nobody\nDescription: text\n"
        files = {**files, "DEBIAN/control": control + (f"Depends: {depends}\n" if depends else "")}
        files[f"usr/share/doc/{name}/copyright"] = f"The terms of {name}."
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        deb = tmp_path / f"{name}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "-b", root, deb], check=True, capture_output=True)
        return deb

    return make


@pytest.fixture
def git_doc(make_deb):
    folder = "usr/share/doc/git-doc"
    pages = {f"{folder}/{name}.html": PAGE.format(name) for name in ("git-add", "git-commit", "index")}
    return make_deb("git-doc", pages | {f"{folder}/empty.html": "<html></html>"})


@pytest.fixture
def perl_doc(make_deb):
    return make_deb(
        "perl-doc", {"usr/share/perl/5.40/pod/perlop.pod": "=head1 NAME\n\nperlop - operators of B<Perl>\n"}
    )


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@needs_dpkg
def test_packages_become_a_corpus_that_every_reader_reads(git_doc, perl_doc, tmp_path):
    corpus = tmp_path / "corpus"
    built, failures = build_corpus(corpus, [git_doc, perl_doc])
    assert failures == {}
    assert files_in(corpus) == [
        "MANIFEST", "git-doc/00000.jsonl", "git-doc/copyright", "perl-doc/00000.jsonl", "perl-doc/copyright",
    ]  # fmt: skip
    documents = load_documents(corpus, cache_dir=tmp_path / "cache")
    assert list(documents["id"]) == [
        "git-doc/usr/share/doc/git-doc/git-add.html",
        "git-doc/usr/share/doc/git-doc/git-commit.html",
        "perl-doc/usr/share/perl/5.40/pod/perlop.pod",
    ]
    assert documents["text"][2] == "NAME\n\nperlop - operators of Perl"
    assert stream_documents(corpus).num_shards == 2
    assert len(load_documents(corpus / "perl-doc", cache_dir=tmp_path / "cache")) == 1
    record = json.loads((corpus / "perl-doc/00000.jsonl").read_text())
    assert set(record) == {"id", "text", "source"}
    assert built["git-doc"].documents == 2
    assert built["git-doc"].characters == sum(len(text) for text in documents["text"][:2])
    assert (built["perl-doc"].version, built["perl-doc"].licence) == ("1.0-1", "Artistic or GPL-1+")
    manifest = json.loads((corpus / "MANIFEST").read_text())
    assert manifest["documents"] == 3
    assert [entry["package"] for entry in manifest["packages"]] == ["git-doc", "perl-doc"]


@needs_dpkg
def test_completed_packages_are_kept_and_damaged_ones_built_again(git_doc, perl_doc, tmp_path):
    corpus = tmp_path / "corpus"

    def stages(*packages, **options):
        seen = []
        build_corpus(corpus, packages, on_progress=lambda p: seen.append((p.package, p.stage)), **options)
        return [entry for entry in seen if entry[1] in ("done", "kept", "failed")]

    assert stages(git_doc) == [("git-doc", "done")]
    assert stages(git_doc, perl_doc) == [("git-doc", "kept"), ("perl-doc", "done")]
    assert stages(git_doc, rebuild=True) == [("git-doc", "done")]
    (corpus / "git-doc/00000.jsonl").write_text("")
    assert stages(perl_doc, git_doc) == [("perl-doc", "kept"), ("git-doc", "done")]
    assert len(json.loads((corpus / "MANIFEST").read_text())["packages"]) == 2


@needs_dpkg
def test_a_package_that_cannot_be_had_is_reported_and_the_others_go_on(perl_doc, tmp_path, monkeypatch):
    def unavailable(package, folder):
        raise DataError(f"no {package} here")

    monkeypatch.setattr(build, "_download", unavailable)
    broken = tmp_path / "git-doc_1_all.deb"
    broken.write_bytes(b"!<arch>\n")
    with pytest.raises(DataError, match="dpkg-deb"):
        build_corpus(tmp_path / "corpus", [broken])
    built, failures = build_corpus(tmp_path / "corpus", ["dict-wn", perl_doc])
    assert list(built) == ["perl-doc"]
    assert failures == {"dict-wn": "no dict-wn here"}


@needs_dpkg
def test_a_package_cut_short_while_it_is_read_leaves_nothing(git_doc, tmp_path, monkeypatch):
    def fail(file):
        raise OSError("no space left on device")

    corpus = tmp_path / "corpus"
    monkeypatch.setattr(build, "FORMATS", {**FORMATS, "html": fail})
    built, failures = build_corpus(corpus, [git_doc])
    assert built == {}
    assert failures == {"git-doc": "no space left on device"}
    assert files_in(corpus) == []
    (corpus / ".git-doc.partial" / "text").mkdir(parents=True)  # as a kill leaves it
    (corpus / ".git-doc.partial" / "text" / "00000.jsonl").write_text("half a rec")
    monkeypatch.undo()
    assert build_corpus(corpus, [git_doc])[1] == {}
    assert files_in(corpus) == ["MANIFEST", "git-doc/00000.jsonl", "git-doc/copyright"]


@needs_dpkg
def test_a_package_that_only_depends_on_the_real_one_leads_there(make_deb, tmp_path, monkeypatch):
    real = make_deb("python3.13-doc", {"usr/share/doc/python3.13/html/tutorial.html": PAGE.format("loops")})
    meta = make_deb("python3-doc", {}, depends="libc6 (>= 2), python3.13-doc (>= 3.13~) | other")
    monkeypatch.setattr(build, "_download", lambda package, folder: {"python3.13-doc": real}[package])
    built, failures = build_corpus(tmp_path / "corpus", [meta])
    assert failures == {}
    assert built["python3-doc"].real_package == "python3.13-doc"
    assert (tmp_path / "corpus/python3-doc/copyright").read_text() == "The terms of python3.13-doc."


@needs_dpkg
def test_links_out_of_a_package_are_not_followed_and_linked_files_are_read_once(git_doc, tmp_path):
    tree = tmp_path / "tree-git-doc" / "usr/share/doc/git-doc"
    secret = tmp_path / "secret.html"
    secret.write_text(PAGE.format("secrets"))
    (tree / "outside.html").symlink_to(secret)
    (tree / "again.html").symlink_to("git-add.html")
    deb = tmp_path / "again.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", tmp_path / "tree-git-doc", deb], check=True, capture_output=True
    )
    built, _ = build_corpus(tmp_path / "corpus", [deb])
    assert built["git-doc"].documents == 2
    assert "secrets" not in (tmp_path / "corpus/git-doc/00000.jsonl").read_text()


@needs_dpkg
def test_large_packages_become_several_files(git_doc, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SHARD_CHARACTERS", 30)
    build_corpus(tmp_path / "corpus", [git_doc])
    assert files_in(tmp_path / "corpus/git-doc") == ["00000.jsonl", "00001.jsonl", "copyright"]


@needs_dpkg
def test_a_package_without_text_is_an_error(make_deb, tmp_path):
    deb = make_deb("git-doc", {"usr/share/doc/git-doc/a.html": "<html></html>"})
    assert "holds no text in 1 files" in build_corpus(tmp_path / "a", [deb])[1]["git-doc"]
    deb = make_deb("perl-doc", {})
    assert "holds no file" in build_corpus(tmp_path / "a", [deb])[1]["perl-doc"]


def test_unknown_packages_missing_files_and_missing_tools_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'perl-doc'"):
        build_corpus(tmp_path, ["perl-docs"])
    with pytest.raises(ConfigError, match="no package"):
        build_corpus(tmp_path, [])
    with pytest.raises(DataError, match="no package file"):
        build_corpus(tmp_path, [tmp_path / "none.deb"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get is not on this machine" in build_corpus(tmp_path / "a", ["perl-doc"])[1]["perl-doc"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "MANIFEST").write_text("include README.md")
    with pytest.raises(DataError, match="no manifest of a corpus"):
        build_corpus(tmp_path, ["perl-doc"])


def test_every_default_package_has_a_recipe_and_every_recipe_a_reader():
    assert all(recipe_of(name) is not None for name in DEFAULT_PACKAGES)
    assert {kind for recipe in RECIPES for kind, _ in recipe.formats} == set(FORMATS)
    assert recipe_of("postgresql-doc-15") is recipe_of("postgresql-doc")
    assert recipe_of("linux-doc-6.1") is recipe_of("linux-doc")
