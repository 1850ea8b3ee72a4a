from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from loopformers.cli.main import main


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"This is text {i} of sixty, about the sea. " * 3)
    return folder


def test_info_counts_each_split_exactly(texts, tmp_path, capsys, tokenizer_of_data):
    assert main(["data", "info", str(texts), "--seq-len", "32", "--cache-dir", str(tmp_path / "cache"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["seq_len"], result["vocab_size"]) == (32, 2048)
    splits = {split["split"]: split for split in result["splits"]}
    assert list(splits) == ["train", "validation", "test"]
    every = [file.read_text() for file in texts.iterdir()]
    tokens = [len(tokenizer_of_data(text)["input_ids"]) + 1 for text in every]
    for key, expected in (
        ("documents", 60),
        ("characters", sum(map(len, every))),
        ("bytes", sum(len(text.encode()) for text in every)),
        ("tokens", sum(tokens)),
    ):
        assert sum(split[key] for split in splits.values()) == expected
    for split in splits.values():
        assert split["windows"] * 32 + split["dropped_tokens"] == split["tokens"]
        assert split["bytes_per_token"] == split["bytes"] / split["tokens"]
        assert 2 < split["unigram_nats"] < 8


@pytest.fixture(scope="session")
def tokenizer_of_data():
    from loopformers.data.tokenizer import bundled_tokenizer

    return bundled_tokenizer()


def test_info_prints_a_table_and_takes_other_tokenizers(texts, tmp_path, capsys, checkpoints):
    arguments = ["data", "info", str(texts), "--tokenizer", str(checkpoints / "lt"), "--cache-dir", str(tmp_path / "c")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "validation" in out
    assert "Windows of 256 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data"], "data info SOURCE"),
        (["data", "info", "nowhere/at.txt"], "no file or folder"),
        (["data", "info", "bundled", "--seq-len", "1"], "at least 2"),
        (["data", "info", "bundled", "--tokenizer", "nowhere"], "holds no tokenizer"),
        (["data", "build", "--packages", "perl-docs"], "did you mean 'perl-doc'"),
    ],
)
def test_bad_input_is_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="packages are made and read with dpkg-deb")
def test_build_reports_what_it_made_and_what_is_missing(tmp_path, capsys, monkeypatch):
    root = tmp_path / "tree"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        "Package: perl-doc\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    )
    pods = root / "usr/share/perl/5/pod"
    pods.mkdir(parents=True)
    (pods / "perlop.pod").write_text("=head1 NAME\n\nperlop - operators and their precedence\n")
    deb = tmp_path / "perl-doc.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", root, deb], check=True, capture_output=True)
    corpus = tmp_path / "corpus"
    assert main(["data", "build", "--packages", str(deb), "--output-dir", str(corpus)]) == 0
    captured = capsys.readouterr()
    assert "perl-doc" in captured.out
    assert "Artistic" in captured.out

    monkeypatch.setattr("loopformers.data.build._download", lambda package, folder: tmp_path / "none.deb")
    assert main(["data", "build", "--packages", str(deb), "dict-wn", "--output-dir", str(corpus), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [package["package"] for package in result["packages"]] == ["perl-doc"]
    assert list(result["failures"]) == ["dict-wn"]


@pytest.mark.parametrize("command", ["build", "info"])
def test_help_of_the_subcommands_needs_no_torch(command, capsys):
    assert main(["data", command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out
