"""A larger corpus from Debian packages of documentation, dictionaries and commentaries.

Packages are downloaded with `apt-get download` (or given as .deb files) and unpacked with `dpkg-deb -x` into a folder
aside; nothing is installed and none of their scripts run. A package becomes a folder of JSON Lines files that appears
complete or not at all; `load_documents` reads the folder above, or one package's.

    corpus/MANIFEST            JSON: what each package gave
    corpus/perl-doc/00000.jsonl, ...   records of id, text, source
    corpus/perl-doc/copyright  the package's own terms
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopformers.data.package_formats import FORMATS
from loopformers.errors import ConfigError, DataError, unknown_name
from loopformers.files import write_whole

__all__ = ["DEFAULT_PACKAGES", "RECIPES", "BuiltPackage", "Progress", "Recipe", "build_corpus"]

MANIFEST = "MANIFEST"
"""Without a suffix, so that nobody reads it as documents."""

SHARD_CHARACTERS = 1 << 24
"""Characters after which the next file is begun: files are the shards of a stream."""

MIN_CHARACTERS = 24
"""Shorter documents are no prose: a headword, an empty page."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the text of a package is found.

    Attributes:
        name: Regular expression of the package's names, which change with their versions.
        formats: Format (of `FORMATS`) and pattern of the files, below the package's root; all of them are read.
        without: Regular expression of paths that are left out: indices, translations, duplicates.
        licence: Under which terms, in short; the package's copyright file is copied beside the text.
    """

    name: str
    formats: tuple[tuple[str, str], ...]
    licence: str
    without: str | None = None


RECIPES: tuple[Recipe, ...] = (
    Recipe(r"dict-gcide", (("dict", "usr/share/dictd/*.dict.dz"),), "GPL-3+ (GCIDE)"),
    Recipe(r"dict-wn", (("dict", "usr/share/dictd/*.dict.dz"),), "WordNet 3.0 licence"),
    Recipe(r"dict-foldoc", (("dict", "usr/share/dictd/*.dict.dz"),), "GFDL-1.1+"),
    Recipe(r"sword-comm-[a-z]+", (("sword", "usr/share/sword/modules/**/*.?zs"),), "public domain texts"),
    Recipe(
        r"linux-doc(-[\d.]+)?",
        (("rest", "usr/share/doc/linux-doc*/Documentation/**/*.rst*"),),
        "GPL-2",
        without=r"/translations/",
    ),
    Recipe(
        r"anarchism",
        (("html", "usr/share/doc/anarchism/html/*.html*"),),
        "GFDL and GPL",
        without=r"/(index|links|new)\.html",
    ),
    Recipe(
        r"python3(\.\d+)?-doc",
        (("html", "usr/share/doc/python3*/html/**/*.html*"),),
        "PSF-2",
        without=r"/(genindex[^/]*|py-modindex|search|contents|download)\.html|/_static/",
    ),
    Recipe(
        r"perl-doc",
        (("pod", "usr/share/perl/*/pod/*.pod"), ("man", "usr/share/man/man3/*.gz")),
        "Artistic or GPL-1+",
        without=r"/(perltoc|perluniprops)\.pod",
    ),
    Recipe(
        r"postgresql-doc(-\d+)?",
        (("html", "usr/share/doc/postgresql-doc-*/html/*.html*"),),
        "PostgreSQL licence",
        without=r"/(bookindex|index)\.html",
    ),
    Recipe(r"git-doc", (("html", "usr/share/doc/git-doc/**/*.html*"),), "GPL-2", without=r"/index\.html"),
    Recipe(
        r"debian-handbook",
        (("html", "usr/share/doc/debian-handbook/html/en-US/*.html*"),),
        "CC-BY-SA-3.0 or GPL-2+",
        without=r"/(index|ix\d+)\.html",
    ),
)
"""The packages that can be read."""

DEFAULT_PACKAGES = (
    "dict-gcide", "dict-wn", "dict-foldoc", "linux-doc", "sword-comm-mhcc", "sword-comm-tdavid", "anarchism", "python3-doc",
    "perl-doc", "postgresql-doc", "git-doc", "debian-handbook",
)  # fmt: skip
"""What is built by default; names without a version, which stand for the distribution's."""


@dataclass(frozen=True)
class BuiltPackage:
    """What a package gave.

    Attributes:
        package: Name asked for.
        real_package: Name of the package that holds the text, where the one asked for only depends on it.
        version: Its version.
        documents: Number of documents.
        characters: Characters (code points) of their texts.
        licence: Under which terms, in short.
        files: Files of records, below the corpus's folder, with their sizes in bytes.
    """

    package: str
    real_package: str
    version: str
    documents: int
    characters: int
    licence: str
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a build stands.

    Attributes:
        package: The running package.
        stage: "download", "unpack", "read", "done", "kept" (an earlier build's) or "failed".
        done: Files of it that are read.
        total: Files of it.
        note: Why it failed.
    """

    package: str
    stage: str
    done: int = 0
    total: int = 0
    note: str = ""


def build_corpus(
    output_dir: str | os.PathLike[str],
    packages: Sequence[str | os.PathLike[str]] = DEFAULT_PACKAGES,
    *,
    rebuild: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[dict[str, BuiltPackage], dict[str, str]]:
    """Build a corpus, package by package; those that an earlier call has completed are kept.

    A package that cannot be had or read is reported, and the others go on.

    Args:
        output_dir: Folder of the corpus. One build at a time.
        packages: Names, or paths of .deb files.
        rebuild: Build completed packages again.
        on_progress: Called as the build goes on.

    Returns:
        All packages of the corpus, earlier ones included, and the reason of each that failed.

    Raises:
        ConfigError: No package, or one that has no recipe.
        DataError: A .deb file that is missing or has no recipe.
        OSError: The folder cannot be written.
    """
    if not packages:
        raise ConfigError("packages names no package to build from; name some, or leave it out for the default ones")
    folder = Path(output_dir)
    wanted = [_resolve(package) for package in packages]
    folder.mkdir(parents=True, exist_ok=True)
    built = _read_manifest(folder)
    failures: dict[str, str] = {}
    for name, deb in dict(wanted).items():
        if not rebuild and name in built:
            on_progress(Progress(name, "kept"))
            continue
        try:
            built[name] = _build_package(folder, name, deb, on_progress)
            _write_manifest(folder, built)
            on_progress(Progress(name, "done"))
        except (DataError, OSError) as error:
            failures[name] = str(error)
            on_progress(Progress(name, "failed", note=str(error)))
    return built, failures


# -- packages --------------------------------------------------------------------------------------------------


def recipe_of(name: str) -> Recipe | None:
    """The recipe of a package, by its name."""
    return next((recipe for recipe in RECIPES if re.fullmatch(recipe.name, name)), None)


def _resolve(package: str | os.PathLike[str]) -> tuple[str, Path | None]:
    """Name of a package, and its file where that was given."""
    given = os.fspath(package)
    if not given.endswith(".deb"):
        if recipe_of(given) is None:
            raise ConfigError(unknown_name("package", given, DEFAULT_PACKAGES) + "; or give the path of a .deb file")
        return given, None
    if not Path(given).is_file():
        raise DataError(f"no package file at {given!r}; check the path")
    name = _field(Path(given), "Package")
    if recipe_of(name) is None:
        raise DataError(f"file {given!r}: " + unknown_name("package", name, DEFAULT_PACKAGES))
    return name, Path(given).resolve()


def _build_package(folder: Path, name: str, deb: Path | None, on_progress: Callable[[Progress], None]) -> BuiltPackage:
    """Make one package's folder aside, then rename it into place."""
    aside = folder / f".{name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        recipe = recipe_of(name)
        assert recipe is not None, "names are checked before anything is built"
        real, root, version = name, aside / "root", ""
        while True:
            if deb is None:
                on_progress(Progress(name, "download"))
                deb = _download(real, aside / "download")
            on_progress(Progress(name, "unpack"))
            _run("dpkg-deb", "-x", str(deb), str(root))
            version = _field(deb, "Version")
            files = list(_files(root, recipe))
            if files:
                break
            needed = re.split(r"[\s(|,:]", _field(deb, "Depends"))
            successor = next((other for other in needed if re.fullmatch(recipe.name, other) and other != real), None)
            if successor is None:
                raise DataError(f"package {name} {version} holds no file {' or '.join(p for _, p in recipe.formats)}")
            real, deb = successor, None
        text = aside / "text"
        documents, characters = _write_shards(text, name, root, files, on_progress)
        if not documents:
            raise DataError(f"package {name} {version} holds no text in {len(files)} files")
        terms = root / "usr/share/doc" / real / "copyright"
        if terms.is_file():
            shutil.copyfile(terms, text / "copyright")
        sizes = {f"{name}/{shard.name}": shard.stat().st_size for shard in sorted(text.glob("*.jsonl"))}
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(text, folder / name)
        return BuiltPackage(name, real, version, documents, characters, recipe.licence, sizes)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _files(root: Path, recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Format and path of the files that a recipe reads, in a fixed order, each once: folders may be links to others."""
    without = None if recipe.without is None else re.compile(recipe.without)
    seen: set[Path] = set()
    inside = root.resolve()
    for kind, pattern in recipe.formats:
        for path in sorted(root.glob(pattern)):
            file = path.resolve()
            # A link may point out of the package, into this system.
            if file in seen or not file.is_file() or not file.is_relative_to(inside):
                continue
            seen.add(file)
            if without is None or not without.search(file.as_posix()):
                yield kind, inside / file.relative_to(inside)


def _write_shards(
    folder: Path,
    package: str,
    root: Path,
    files: Sequence[tuple[str, Path]],
    on_progress: Callable[[Progress], None],
) -> tuple[int, int]:
    """Write the documents of all files as JSON Lines and return how many documents and characters they are."""
    folder.mkdir(parents=True)
    documents = characters = 0
    with contextlib.ExitStack() as open_files:
        shard: Any = None
        in_shard = SHARD_CHARACTERS
        for done, (kind, file) in enumerate(files):
            on_progress(Progress(package, "read", done, len(files)))
            path = file.relative_to(root.resolve()).as_posix()
            for part, text in FORMATS[kind](file):
                if len(text) < MIN_CHARACTERS:
                    continue
                if in_shard >= SHARD_CHARACTERS:
                    open_files.close()
                    number = len(list(folder.glob("*.jsonl")))
                    shard = open_files.enter_context((folder / f"{number:05}.jsonl").open("w", encoding="utf-8"))
                    in_shard = 0
                record = {"id": f"{package}/{path}" + (f"#{part}" if part else ""), "text": text, "source": package}
                shard.write(json.dumps(record, ensure_ascii=False) + "\n")
                documents += 1
                characters += len(text)
                in_shard += len(text)
    return documents, characters


# -- the distribution's tools ----------------------------------------------------------------------------------


def _download(package: str, folder: Path) -> Path:
    """Download a package, from the sources that this system is set up with."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("apt-get", "download", package, cwd=folder)
    found = [file for file in folder.glob("*.deb") if file.name.startswith(f"{package}_")]
    if not found:
        raise DataError(f"apt-get download {package} left no .deb file; give one that you downloaded yourself")
    return found[0]


def _field(deb: Path, field: str) -> str:
    """A field of a package's description; empty where it has none."""
    return _run("dpkg-deb", "-f", str(deb), field).strip()


def _run(*command: str, cwd: Path | None = None) -> str:
    """Run a tool of the distribution and return what it prints.

    Raises:
        DataError: It is not there, or fails.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError as error:
        raise DataError(
            f"{command[0]} is not on this machine, and packages are read with it; build the corpus on Debian or Ubuntu, "
            "and copy its folder here"
        ) from error
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("W:")]
        reason = lines[-1].strip() if lines else f"exit code {result.returncode}"
        raise DataError(
            f"{' '.join(command[:2])} {Path(command[2]).name} failed ({reason}); run apt-get update and try again, or give "
            "the path of a complete .deb file"
        )
    return result.stdout


# -- the manifest ----------------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> dict[str, BuiltPackage]:
    """The packages that earlier builds have completed, as far as all of their files are still there."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["packages"]
        built = {entry["package"]: BuiltPackage(**entry) for entry in entries}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(folder / MANIFEST)!r} is no manifest of a corpus ({error}); choose another folder, or delete the file"
        ) from error
    return {name: package for name, package in built.items() if _is_there(folder, package)}


def _is_there(folder: Path, package: BuiltPackage) -> bool:
    paths = ((folder / file, size) for file, size in package.files.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _write_manifest(folder: Path, built: dict[str, BuiltPackage]) -> None:
    totals = {name: sum(getattr(package, name) for package in built.values()) for name in ("documents", "characters")}
    write_whole(folder / MANIFEST, json.dumps({**totals, "packages": [asdict(p) for p in built.values()]}, indent=1))
