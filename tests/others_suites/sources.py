"""Finds the test suites of other packages in their source distributions, and makes them importable.

Nothing of these suites is part of this repository. `python -m tests.others_suites.sources NAME ..` downloads the source
distribution of the installed version of each package into `build/others` and unpacks it there; a suite of ours then opens
its tests as a package under another name, with stand-ins for modules that the distribution leaves out:

    tests = open_tests("transformers", stand_ins={"generation.test_utils": {"GenerationTesterMixin": object}})
    common = importlib.import_module(f"{tests}.test_modeling_common")

Only the command uses the network. Where a source has not been fetched, `open_tests` raises SourceMissingError.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["CACHE", "SourceMissingError", "fetch", "open_tests", "unpacked"]

CACHE = Path(__file__).parents[2] / "build" / "others"
"""Folder of archives and unpacked sources; git ignores it."""

PATIENCE_S = 300
"""Seconds that a download may take, the build of its metadata included."""


class SourceMissingError(Exception):
    """The source distribution of an installed package is not at hand; the text says why and what would fetch it."""


def fetch(package: str, *, cache: Path = CACHE) -> Path:
    """Download and unpack the source distribution of the installed version, unless it is there.

    Returns:
        The folder with the source's top level.

    Raises:
        SourceMissingError: The package is not installed, or its source cannot be downloaded.
    """
    version = _installed(package)
    folder = cache / f"{package}-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    if not (archive := folder.with_name(f"{folder.name}.tar.gz")).exists():
        _download(f"{package}=={version}", cache)
    if not archive.exists():
        raise SourceMissingError(f"pip downloaded {package} {version}, but not as {archive.name}")
    with tempfile.TemporaryDirectory(dir=cache) as scratch, tarfile.open(archive) as content:
        content.extractall(scratch, filter="data")
        os.replace(Path(scratch) / folder.name, folder)  # complete or not at all
    return folder


def unpacked(package: str, *, cache: Path = CACHE) -> Path:
    """Return the folder that `fetch` has made for the installed version, without using the network.

    Raises:
        SourceMissingError: There is none.
    """
    folder = cache / f"{package}-{_installed(package)}"
    if not folder.is_dir():
        raise SourceMissingError(
            f"{folder} does not exist; run `python -m tests.others_suites.sources {package}`, which downloads it"
        )
    return folder


def open_tests(
    package: str,
    folder: str = "tests",
    *,
    stand_ins: Mapping[str, Mapping[str, Any]] | None = None,
    cache: Path = CACHE,
) -> str:
    """Make a folder of an unpacked source importable as a package, and return the name of that package.

    Args:
        package: Name of the distribution.
        folder: Folder in its source that holds the tests.
        stand_ins: Modules that the source leaves out, by dotted name below the folder, and what they hold.
        cache: Where `fetch` has put the source.

    Raises:
        SourceMissingError: The source has not been fetched.
    """
    name = f"{package.replace('-', '_')}_own_{folder.replace('/', '_')}"
    if name not in sys.modules:
        tests = unpacked(package, cache=cache) / folder
        (tests / "__init__.py").touch()  # some of their modules open it as a file
        _module(name).__path__ = [str(tests)]
    for module, content in (stand_ins or {}).items():
        *parents, _ = module.split(".")
        for depth in range(len(parents)):
            parent = ".".join((name, *parents[: depth + 1]))
            if parent not in sys.modules:
                _module(parent).__path__ = []
        vars(_module(f"{name}.{module}")).update(content)
    return name


def _module(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name))


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise SourceMissingError(f"{package} is not installed") from error


def _download(requirement: str, cache: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--retries", "1"]
    command += ["--timeout", "15", "--no-deps", "--no-binary", ":all:", "--dest", str(cache), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise SourceMissingError(f"the source of {requirement} did not download in {PATIENCE_S} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or f"pip ended with {done.returncode}").splitlines()[-1]
        raise SourceMissingError(f"the source of {requirement} cannot be downloaded: {reason}")


def main(packages: list[str]) -> None:
    """Fetch each package's source; where one cannot be had, print why, and leave it to its suite to skip."""
    for package in packages:
        try:
            print(f"{package}: {fetch(package)}")
        except SourceMissingError as error:
            print(f"{package}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
