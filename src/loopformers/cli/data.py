"""`loopformers data`: build a corpus from Debian packages, and count what a source of text holds."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopformers.cli.console import print_json, print_note, print_table, stderr
from loopformers.cli.parser import count
from loopformers.cli.paths import path
from loopformers.errors import ConfigError

if TYPE_CHECKING:
    from loopformers.data.build import BuiltPackage, Progress
    from loopformers.data.statistics import SplitCounts
    from loopformers.report.tables import Table, Value

__all__ = ["add_arguments", "run"]

INCOMPLETE = 1
"""Exit code of a build that some package is missing from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two subcommands and their arguments."""
    parser.usage = "loopformers data {build,info} [options]"
    parser.description = "Build a corpus from Debian packages, or count what a source of text holds."
    parser.epilog = (
        "examples:\n"
        "  loopformers data build --output-dir corpus\n"
        "  loopformers data build --packages perl-doc dict-wn --output-dir corpus\n"
        "  loopformers data info corpus --seq-len 512\n"
        "  loopformers data info my-texts/ --split-by tail --json"
    )
    commands = parser.add_subparsers(prog=parser.prog, dest="data_command", metavar="{build,info}")
    _add_build(commands)
    _add_info(commands)


def _add_build(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="make a corpus of documentation, dictionaries and commentaries from Debian packages",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.description = (
        "Download packages with apt-get, unpack them without installing, and write their prose as JSON Lines. Packages that\n"
        "an earlier build completed are kept; one that cannot be had is reported, and the others go on (exit code 1).\n"
        "Run apt-get update first. The default packages hold about 146 million characters (download: 140 MB)."
    )
    parser.add_argument(
        "--packages",
        nargs="+",
        metavar="PACKAGE",
        help="names, or paths of .deb files (default: dict-gcide dict-wn dict-foldoc linux-doc sword-comm-mhcc "
        "sword-comm-tdavid anarchism python3-doc perl-doc postgresql-doc git-doc debian-handbook)",
    )
    parser.add_argument(
        "--output-dir", type=path, default="corpus", metavar="DIR", help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--rebuild", action="store_true", help="build packages again that are there already")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="count documents, characters, tokens and windows of a source, by split",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.description = (
        "Count a source by split, exactly, and give the cross entropy of its token frequencies: the level of a model that\n"
        "ignores its context. Tokens are kept in the cache, where training finds them."
    )
    parser.add_argument(
        "source",
        type=path,
        metavar="SOURCE",
        help="bundled, a file, a folder, or the name of a dataset, as for `train`",
    )
    parser.add_argument(
        "--tokenizer", type=path, default="bundled", metavar="DIR", help="folder of one (default: %(default)s)"
    )
    parser.add_argument(
        "--seq-len", type=count(), default=256, metavar="N", help="tokens in a window (default: %(default)s)"
    )
    parser.add_argument(
        "--split-by",
        choices=("document", "id", "tail"),
        default="document",
        help="tail cuts each document in three, for a corpus of few (default: %(default)s)",
    )
    parser.add_argument(
        "--text-column", default="text", metavar="NAME", help="where the text is (default: %(default)s)"
    )
    parser.add_argument("--id-column", default="id", metavar="NAME", help="where the id is (default: %(default)s)")
    parser.add_argument(
        "--cache-dir", type=path, metavar="DIR", help="where data and tokens are kept (default: usual caches)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: No subcommand.
    """
    if arguments.data_command is None:
        raise ConfigError("data needs to know what to do: loopformers data build, or loopformers data info SOURCE")
    return _build(arguments) if arguments.data_command == "build" else _info(arguments)


# -- build -----------------------------------------------------------------------------------------------------


def _build(arguments: argparse.Namespace) -> int:
    from loopformers.data.build import DEFAULT_PACKAGES, build_corpus

    with _Bar() as bar:
        built, failures = build_corpus(
            arguments.output_dir,
            arguments.packages or DEFAULT_PACKAGES,
            rebuild=arguments.rebuild,
            on_progress=bar.on_progress,
        )
    if arguments.json:
        packages = [dataclasses.asdict(package) for package in built.values()]
        print_json({"output_dir": arguments.output_dir, "packages": packages, "failures": failures})
    else:
        if built:
            print_table(_built_table(arguments.output_dir, built))
        for name, reason in failures.items():
            print_note(f"{name} is missing: {reason}")
    return INCOMPLETE if failures else 0


class _Bar:
    """A progress bar on stderr: one line for all packages, with the running one's stage."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[stage]}"),
            console=stderr(),
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def on_progress(self, progress: Progress) -> None:
        """Show what a build reports."""
        name = progress.package
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=None, stage="")
        finished = progress.stage in ("done", "kept", "failed")
        self.progress.update(
            self.tasks[name],
            stage=progress.stage,
            completed=1 if finished else progress.done,
            total=1 if finished else progress.total or None,
        )


def _built_table(folder: str, built: Mapping[str, BuiltPackage]) -> Table:
    from loopformers.report.tables import Column, Table

    rows: list[dict[str, Value]] = [
        {
            "package": package.real_package,
            "version": package.version,
            "documents": package.documents,
            "characters": package.characters,
            "licence": package.licence,
        }
        for package in built.values()
    ]
    total = {name: sum(getattr(package, name) for package in built.values()) for name in ("documents", "characters")}
    rows.append({"package": "all", "version": None, **total, "licence": None})
    return Table(
        title=folder,
        columns=(
            Column(key="package", title="package"),
            Column(key="version", title="version"),
            Column(key="documents", title="documents", align="right", format=",d"),
            Column(key="characters", title="characters", align="right", format=",d"),
            Column(key="licence", title="licence"),
        ),
        rows=tuple(rows),
        note="The terms of each package lie beside its text, in the file copyright.",
    )


# -- info ------------------------------------------------------------------------------------------------------


def _info(arguments: argparse.Namespace) -> int:
    from loopformers.data.packing import check_seq_len

    check_seq_len(arguments.seq_len)
    from loopformers.data.corpora import load_splits
    from loopformers.data.packing import tokenize_documents
    from loopformers.data.statistics import count_splits
    from loopformers.data.tokenizer import bundled_tokenizer
    from loopformers.model.tokenizer import vocabulary_size

    if arguments.tokenizer == "bundled":
        tokenizer: Any = bundled_tokenizer()
    else:
        from loopformers.cli.checkpoint import load_tokenizer

        tokenizer = load_tokenizer(arguments.tokenizer)
    splits = load_splits(
        arguments.source,
        split_by=arguments.split_by,
        text_column=arguments.text_column,
        id_column=arguments.id_column,
        cache_dir=arguments.cache_dir,
    )
    streams = {
        name: tokenize_documents(part, tokenizer, cache_dir=arguments.cache_dir) for name, part in splits.items()
    }
    vocab_size = vocabulary_size(tokenizer)
    counts = count_splits(streams, vocab_size, arguments.seq_len)
    if arguments.json:
        print_json(
            {
                "source": arguments.source,
                "tokenizer": arguments.tokenizer,
                "vocab_size": vocab_size,
                "seq_len": arguments.seq_len,
                "splits": [dataclasses.asdict(split) for split in counts],
            }
        )
    else:
        print_table(_counts_table(arguments.source, counts, arguments.seq_len, vocab_size))
    return 0


def _counts_table(source: str, counts: Sequence[SplitCounts], seq_len: int, vocab_size: int) -> Table:
    from loopformers.report.tables import Column, Table

    def count(key: str, title: str) -> Column:
        return Column(key=key, title=title, align="right", format=",d")

    return Table(
        title=source,
        columns=(
            Column(key="split", title="split"),
            count("documents", "documents"),
            count("characters", "characters"),
            count("bytes", "bytes"),
            count("tokens", "tokens"),
            Column(key="bytes_per_token", title="bytes per token", align="right", format=".3f"),
            count("windows", "windows"),
            count("dropped_tokens", "dropped tokens"),
            Column(key="unigram_nats", title="unigram", unit="nats per token", align="right", format=".4f"),
        ),
        rows=tuple(dataclasses.asdict(split) for split in counts),
        note=f"Windows of {seq_len} tokens, without padding; a vocabulary of {vocab_size:,} entries.",
    )
