"""The package index: which of the user's sources offer a file.

Sources are asked in pip's order: ``find-links``, then ``index-url``, then each ``extra-index-url``. A page
is a simple-API page in HTML (PEP 503) or JSON (PEP 691), over HTTP or in a local folder (``file://``).
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
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
    from collections.abc import Iterable, Iterator

    from vllm_stack.pip_config import PipConfig

_HTTP_NOT_FOUND = 404
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
    """A source that does not offer the file, and why."""

    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


class _AbsentError(Exception):
    """The source has nothing of the project."""


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
        for place in self.config.find_links:
            yield from self._ask(as_url(place), place, project, filename)
        if self.config.no_index:
            return
        for index in (self.config.index_url or PYPI_SIMPLE_ENDPOINT, *self.config.extra_index_urls):
            page = urljoin(as_url(index).rstrip("/") + "/", f"{project}/")
            yield from self._ask(page, index, project, filename)

    def _ask(self, url: str, place: str, project: str, filename: str) -> Iterator[Candidate | Miss]:
        source = redact(place)
        try:
            offers: list[Candidate | Miss] = list(self._offers(url, source, project, filename))
        except _AbsentError:
            yield Miss(source, f"has no project {project}")
        except _PAGE_ERRORS as error:
            yield Miss(source, explain(error))
        else:
            yield from offers or [Miss(source, f"does not list {filename}")]

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

    def _http_page(self, url: str, project: str) -> ProjectPage:
        response = self.session.get(url, headers={"Accept": ACCEPT_ANY}, timeout=self.config.timeout)
        if response.status_code == _HTTP_NOT_FOUND:
            raise _AbsentError
        response.raise_for_status()
        with warnings.catch_warnings():
            # A newer minor version of the API adds keys that we do not need.
            warnings.simplefilter("ignore", UnexpectedRepoVersionWarning)
            return ProjectPage.from_response(response, project)


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
            digest = re.match(r"[0-9a-f]{64}(?![0-9a-f])", package.digests.get("sha256", "").lower())
            yield Candidate(package.url, source, digest[0] if digest else None, package.size)


def _basename(url: str) -> str:
    return PurePosixPath(unquote(urlsplit(urldefrag(url).url).path)).name
