"""The package index: which of the user's sources offer a file.

Sources are asked in pip's order: ``find-links``, then ``index-url``, then each ``extra-index-url``. A page
is a simple-API page in HTML (PEP 503) or JSON (PEP 691), over HTTP or in a local folder (``file://``).
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from packaging.utils import canonicalize_name
from pypi_simple import (
    ACCEPT_ANY,
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    ProjectPage,
    UnexpectedRepoVersionWarning,
    UnsupportedRepoVersionError,
)

from vllm_stack.connection import TRANSFER_ERRORS, IndexSession, explain, redact
from vllm_stack.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm_stack.pip_config import PipConfig

_HTTP_NOT_FOUND = 404
#: How the names of files end that an index may list and a folder of ``find-links`` is searched for.
_ARCHIVES = (".tar.gz", ".whl", ".zip")
#: What reading a page raises when the source is unreachable or is no index.
_PAGE_ERRORS = (*TRANSFER_ERRORS, ValueError, UnsupportedRepoVersionError)


@dataclass(frozen=True)
class Candidate:
    """A place that offers the wanted file."""

    #: May hold the user's credentials, so that it is never shown.
    url: str = field(repr=False)
    #: The source for people: without credentials.
    source: str
    #: What the index says of the file, where it does.
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Miss:
    """A source that does not offer the file (or, of a listing, any), and why."""

    source: str
    reason: str
    #: Whether the source could not be asked, so that what it has is not known.
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass(frozen=True)
class Offer:
    """A file that a source lists, whatever it is."""

    filename: str
    place: Candidate
    #: Why the file was yanked (PEP 592), "" when no reason is given; None for one that is not.
    yanked: str | None = None


class _AbsentError(Exception):
    """The source has nothing of the project."""


_Found = TypeVar("_Found", Candidate, Offer)


class PackageIndex:
    """The sources that a pip configuration names."""

    def __init__(self, config: PipConfig, *, backoff: float = 0.25) -> None:
        self.config = config
        #: Seconds before the second try; each further one waits twice as long.
        self.backoff = backoff

    @cached_property
    def session(self) -> IndexSession:
        """The connection to all sources."""
        return IndexSession(self.config, backoff=self.backoff)

    def find(self, distribution: str, filename: str) -> tuple[Candidate, ...]:
        """Return all places that offer ``filename``. NetworkError, with each source tried, when none does."""
        results = list(self.search(distribution, filename))
        found = tuple(result for result in results if isinstance(result, Candidate))
        if not found:
            raise not_found(filename, map(str, results))
        return found

    def search(self, distribution: str, filename: str) -> Iterator[Candidate | Miss]:
        """Ask source after source for ``filename`` and yield its places there, or one Miss.

        A source is asked only when the caller wants more than the ones before it gave.
        """
        project = canonicalize_name(distribution)
        for url, place in self._pages(project):
            source = redact(place)
            found = _ask(source, project, partial(self._offers, url, source, project, filename))
            yield from found or [Miss(source, f"does not list {filename}")]

    def listing(self, distribution: str) -> Iterator[Offer | Miss]:
        """Yield all files that each source lists on the page of ``distribution``, or a Miss for the source.

        A page of ``find-links`` may list files of other projects too.
        """
        project = canonicalize_name(distribution)
        for url, place in self._pages(project):
            source = redact(place)
            yield from _ask(source, project, partial(self._listed, url, source, project))

    def _pages(self, project: str) -> Iterator[tuple[str, str]]:
        """Yield the address of each source's page, and the source as the configuration names it."""
        for place in self.config.find_links:
            yield as_url(place), place
        if self.config.no_index:
            return
        for index in (self.config.index_url or PYPI_SIMPLE_ENDPOINT, *self.config.extra_index_urls):
            yield urljoin(as_url(index).rstrip("/") + "/", f"{project}/"), index

    def _offers(self, url: str, source: str, project: str, filename: str) -> Iterator[Candidate]:
        scheme = urlsplit(url).scheme
        if _basename(url) == filename:  # find-links may name the file itself
            yield Candidate(url, source)
        elif scheme == "file":
            yield from _local_offers(local_path(url), source, project, filename)
        elif scheme in ("http", "https"):
            yield from _matching(self._http_page(url, project).packages, source, filename, {"http", "https"})
        else:
            raise ValueError(f"addresses of the kind {scheme}: are not supported")

    def _listed(self, url: str, source: str, project: str) -> Iterator[Offer]:
        scheme = urlsplit(url).scheme
        if scheme == "file":
            yield from _local_listing(local_path(url), source, project)
        elif scheme not in ("http", "https"):
            raise ValueError(f"addresses of the kind {scheme}: are not supported")
        elif _basename(url).endswith(_ARCHIVES):  # find-links may name a file itself
            yield Offer(_basename(url), Candidate(url, source))
        else:
            yield from _offered(self._http_page(url, project).packages, source, {"http", "https"})

    def _http_page(self, url: str, project: str) -> ProjectPage:
        response = self.session.get(url, headers={"Accept": ACCEPT_ANY}, timeout=self.config.timeout)
        if response.status_code == _HTTP_NOT_FOUND:
            raise _AbsentError
        response.raise_for_status()
        with warnings.catch_warnings():
            # A newer minor version of the API adds keys that we do not need.
            warnings.simplefilter("ignore", UnexpectedRepoVersionWarning)
            return ProjectPage.from_response(response, project)


def _ask(source: str, project: str, question: Callable[[], Iterator[_Found]]) -> list[_Found | Miss]:
    """Return what a source answers; a source that has nothing, or does not answer, becomes a Miss."""
    try:
        return list(question())
    except _AbsentError:
        return [Miss(source, f"has no project {project}")]
    except _PAGE_ERRORS as error:
        return [Miss(source, explain(error), failed=True)]


def not_found(filename: str, tried: Iterable[str]) -> NetworkError:
    """Return the error for a file that no source gave; ``tried`` has one line per source."""
    lines = list(tried)
    return NetworkError(
        f"no package source has {filename}"
        if lines
        else f"there is no package source to get {filename} from",
        details=lines,
        hint="the sources are those of pip: `python -m pip config debug` shows where each comes from",
    )


def as_url(place: str) -> str:
    """Return the URL of ``place``, which may be a local path, as pip allows."""
    # A scheme has two letters or more.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", place):
        return place
    return Path(place).expanduser().absolute().as_uri()


def local_path(url: str) -> Path:
    """Return the path that a ``file:`` URL names."""
    return Path(url2pathname(urlsplit(url).path))


def _local_offers(path: Path, source: str, project: str, filename: str) -> Iterator[Candidate]:
    """Yield what a page, or a folder with a page or the file itself, offers."""
    if not path.exists():
        raise _AbsentError
    pages = [path / "index.html", path / "index.json"] if path.is_dir() else [path]
    for page in pages:
        if page.is_file():
            yield from _matching(
                _local_page(page, project).packages, source, filename, {"http", "https", "file"}
            )
            return
    if (path / filename).is_file():
        yield Candidate((path / filename).as_uri(), source)


def _local_listing(path: Path, source: str, project: str) -> Iterator[Offer]:
    """Yield what a page, or a folder with a page or with files, or a file by itself, lists."""
    if not path.exists():
        raise _AbsentError
    pages = [path / "index.html", path / "index.json"] if path.is_dir() else [path]
    for page in pages:
        if page.is_file() and not page.name.endswith(_ARCHIVES):
            yield from _offered(_local_page(page, project).packages, source, {"http", "https", "file"})
            return
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.name.endswith(_ARCHIVES) and file.is_file():
            place = Candidate(file.absolute().as_uri(), source, size=file.stat().st_size)
            yield Offer(file.name, place)


def _local_page(page: Path, project: str) -> ProjectPage:
    data, base = page.read_bytes(), page.absolute().as_uri()
    if page.suffix == ".json":
        return ProjectPage.from_json_data(json.loads(data), base_url=base)
    return ProjectPage.from_html(project, data, base_url=base)


def _matching(
    packages: Iterable[DistributionPackage], source: str, filename: str, schemes: set[str]
) -> Iterator[Candidate]:
    """Yield the links to ``filename``. A remote page cannot point into the local file system."""
    for package in packages:
        if (
            filename in (package.filename.strip(), _basename(package.url))
            and urlsplit(package.url).scheme in schemes
        ):
            yield _candidate(package, source)


def _offered(packages: Iterable[DistributionPackage], source: str, schemes: set[str]) -> Iterator[Offer]:
    """Yield all links. A remote page cannot point into the local file system."""
    for package in packages:
        if urlsplit(package.url).scheme in schemes:
            yanked = (package.yanked_reason or "") if package.is_yanked else None
            yield Offer(_basename(package.url), _candidate(package, source), yanked)


def _candidate(package: DistributionPackage, source: str) -> Candidate:
    digest = re.match(r"[0-9a-f]{64}(?![0-9a-f])", package.digests.get("sha256", "").lower())
    return Candidate(package.url, source, digest[0] if digest else None, package.size)


def _basename(url: str) -> str:
    return PurePosixPath(unquote(urlsplit(urldefrag(url).url).path)).name
