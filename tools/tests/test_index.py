"""The user's pip configuration, and finding a file in the sources that it names."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import venv
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest
from indexserver import IndexServer, serve

from vllm_stack.connection import IndexSession, explain, redact
from vllm_stack.errors import NetworkError, StackError, UsageError
from vllm_stack.index import Candidate, Miss, Offer, PackageIndex, as_url, local_path
from vllm_stack.pip_config import PipConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "demo-1.0.tar.gz"
DATA = b"the sdist"
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with serve() as running:
        running.files[NAME] = DATA
        yield running


@pytest.fixture(autouse=True)
def pip_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration but the test's."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def index_of(*, retries: int = 0, no_index: bool = False, **options: object) -> PackageIndex:
    values = {"timeout": 5.0, "retries": retries, "no_index": no_index, **options}
    return PackageIndex(PipConfig(**values), backoff=0)  # type: ignore[arg-type]


def write_page(folder: Path, *links: str) -> None:
    folder.mkdir(parents=True)
    anchors = "".join(f'<a href="{link}">{link.rpartition("/")[2].partition("#")[0]}</a>' for link in links)
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{anchors}</body></html>")


# -- the configuration


def test_without_configuration_the_defaults_are_those_of_pip() -> None:
    assert PipConfig.load() == PipConfig()


def test_file_sections_and_environment_are_merged_as_pip_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://global.invalid/simple\ntimeout = 7\nretries = 1\n"
        "extra-index-url =\n    https://one.invalid/simple\n    https://two.invalid/simple\n"
        "trusted-host = one.invalid\nproxy = http://proxy.invalid:3128\n"
        "[download]\nindex-url = https://download.invalid/simple\ntimeout = 8\n"
        "[install]\nindex-url = https://install.invalid/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "9")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels https://three.invalid/links")
    monkeypatch.setenv("PIP_NO_INDEX", "")
    # Whoever runs this may have certificates of their own in the system's configuration.
    assert replace(PipConfig.load(), cert=None, client_cert=None) == PipConfig(
        index_url="https://download.invalid/simple",
        extra_index_urls=("https://one.invalid/simple", "https://two.invalid/simple"),
        find_links=("/wheels", "https://three.invalid/links"),
        trusted_hosts=("one.invalid",),
        proxy="http://proxy.invalid:3128",
        timeout=9.0,
        retries=1,
    )


@pytest.mark.parametrize("setting", ["quiet = 3", "verbose = 2"])
def test_verbosity_settings_do_not_hide_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\n{setting}\nindex-url = https://it's.invalid/a=b.c\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert PipConfig.load().index_url == "https://it's.invalid/a=b.c"


def test_python_variables_do_not_reach_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_PYTHON", "/nonexistent/python")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/")
    assert PipConfig.load().index_url == "https://index.invalid/"


def test_a_broken_configuration_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("index-url without a section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    with pytest.raises(UsageError, match="cannot read its configuration") as caught:
        PipConfig.load()
    assert str(config) in "\n".join(caught.value.details)


def test_a_python_without_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(StackError, match="bare/bin/python has no pip"):
        PipConfig.load()


@pytest.mark.parametrize(
    ("option", "value"), [("timeout", "soon"), ("retries", "-1"), ("timeout", "inf"), ("no-index", "perhaps")]
)
def test_an_invalid_value_names_its_option(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=option):
        PipConfig.from_options({option: value})


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("On", True), ("0", False), ("no", False)])
def test_no_index_takes_the_booleans_of_pip(value: str, *, expected: bool) -> None:
    assert PipConfig.from_options({"no-index": value}).no_index is expected


# -- pages over HTTP


@pytest.mark.parametrize("style", ["html", "json"])
def test_html_and_json_pages_give_address_and_hash(server: IndexServer, style: str) -> None:
    server.style = style  # type: ignore[assignment]
    (found,) = index_of(index_url=server.index).find("Demo", NAME)
    assert (found.url, found.sha256) == (f"{server.url}/files/{NAME}", SHA)


def test_an_exact_name_is_found_and_no_similar_one(server: IndexServer) -> None:
    server.files = {"demo-1.0.tar.gz.asc": b"", "xdemo-1.0.tar.gz": b"", "demo-1.0.post1.tar.gz": b""}
    with pytest.raises(NetworkError, match="no package source has"):
        index_of(index_url=server.index).find("demo", NAME)


def test_a_local_version_is_found_behind_an_escaped_link(server: IndexServer) -> None:
    server.files = {"demo-1.0%2Bbw.1.tar.gz": DATA}
    (found,) = index_of(index_url=server.index).find("demo", "demo-1.0+bw.1.tar.gz")
    assert found.url.endswith("/demo-1.0%2Bbw.1.tar.gz")


def test_an_index_that_lacks_the_project_is_no_error_while_another_has_it(
    server: IndexServer, tmp_path: Path
) -> None:
    index = index_of(index_url=f"{server.url}/elsewhere", extra_index_urls=(tmp_path.as_uri(), server.index))
    results = list(index.search("demo", NAME))
    assert [type(result) for result in results] == [Miss, Miss, Candidate]
    sources = [f"{server.url}/elsewhere", tmp_path.as_uri(), server.index]
    assert [result.source for result in results] == sources
    assert index.find("demo", NAME) == (results[2],)


def test_when_all_lack_it_each_source_is_named_without_credentials(
    server: IndexServer, tmp_path: Path
) -> None:
    secret = server.index.replace("://", "://user:pass@word@")
    index = index_of(
        index_url=secret.replace("/simple", "/elsewhere"),
        extra_index_urls=(secret,),
        find_links=(str(tmp_path), "ftp://user:pass@ftp.invalid/"),
    )
    with pytest.raises(NetworkError) as caught:
        index.find("demo", "demo-2.0.tar.gz")
    assert caught.value.details == (
        f"{tmp_path}: does not list demo-2.0.tar.gz",
        "ftp://ftp.invalid/: addresses of the kind ftp: are not supported",
        f"{server.url}/elsewhere: has no project demo",
        f"{server.index}: does not list demo-2.0.tar.gz",
    )
    assert "pass" not in repr(caught.value.__dict__)


def test_later_sources_are_not_asked_when_the_first_one_will_do(server: IndexServer) -> None:
    index = index_of(index_url=server.index, extra_index_urls=(server.index,))
    next(index.search("demo", NAME))
    assert [path for path, _ in server.requests] == ["/simple/demo/"]


def test_a_failing_page_is_asked_for_again(server: IndexServer) -> None:
    server.page_statuses = [500, 503]
    assert index_of(index_url=server.index, retries=2).find("demo", NAME)
    assert len(server.requests) == 3


def test_a_page_that_keeps_failing_gives_its_status(server: IndexServer) -> None:
    server.page_statuses = [500, 502]
    with pytest.raises(NetworkError) as caught:
        index_of(index_url=server.index, retries=1).find("demo", NAME)
    assert caught.value.details == (f"{server.index}: HTTP 502 Bad Gateway",)


def test_a_forbidden_page_is_not_asked_for_again(server: IndexServer) -> None:
    server.page_statuses = [403]
    with pytest.raises(NetworkError) as caught:
        index_of(index_url=server.index, retries=3).find("demo", NAME)
    assert caught.value.details == (f"{server.index}: HTTP 403 Forbidden",)
    assert len(server.requests) == 1


def test_an_unreachable_index_is_a_network_error() -> None:
    with pytest.raises(NetworkError) as caught:
        index_of(index_url="http://user:secret@127.0.0.1:9/simple").find("demo", NAME)
    assert "127.0.0.1:9" in caught.value.details[0]
    assert "secret" not in caught.value.details[0]


def test_broken_json_is_reported_and_not_raised(server: IndexServer, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "index.json").write_text('{"files": 3}')
    index = index_of(index_url=tmp_path.as_uri(), extra_index_urls=(server.index,))
    assert [type(result) for result in index.search("demo", NAME)] == [Miss, Candidate]


def test_no_index_leaves_find_links_alone(server: IndexServer, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    index = index_of(index_url=server.index, find_links=(str(tmp_path),), no_index=True)
    assert [local_path(found.url) for found in index.find("demo", NAME)] == [tmp_path / NAME]
    assert server.requests == []


def test_no_source_at_all_is_said() -> None:
    with pytest.raises(NetworkError, match="no package source to get"):
        index_of(no_index=True).find("demo", NAME)


# -- local sources


def test_a_local_index_with_pages(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    write_page(root / "demo", f"../../files/{NAME}#sha256={SHA}")
    (found,) = index_of(index_url=root.as_uri()).find("demo", NAME)
    assert (local_path(found.url), found.sha256) == (tmp_path / "files" / NAME, SHA)


def test_a_local_index_may_be_named_by_its_path(tmp_path: Path) -> None:
    write_page(tmp_path / "demo", NAME)
    (found,) = index_of(index_url=str(tmp_path)).find("demo", NAME)
    assert local_path(found.url) == tmp_path / "demo" / NAME


def test_a_local_json_page(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    file = {"filename": NAME, "url": NAME, "hashes": {"sha256": SHA.upper()}, "size": len(DATA)}
    page = {"meta": {"api-version": "1.1"}, "name": "demo", "versions": ["1.0"], "files": [file]}
    (tmp_path / "demo" / "index.json").write_text(json.dumps(page))
    (found,) = index_of(index_url=tmp_path.as_uri()).find("demo", NAME)
    assert (found.sha256, found.size) == (SHA, len(DATA))


@pytest.mark.parametrize("form", ["folder", "page", "file", "url"])
def test_find_links_may_be_a_folder_a_page_or_the_file(tmp_path: Path, form: str) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    write_page(tmp_path / "pages", f"../{NAME}")
    place = {
        "folder": str(tmp_path),
        "page": str(tmp_path / "pages" / "index.html"),
        "file": str(tmp_path / NAME),
        "url": tmp_path.as_uri(),
    }[form]
    (found,) = index_of(find_links=(place,), no_index=True).find("demo", NAME)
    assert local_path(found.url).resolve() == tmp_path / NAME


def test_find_links_over_http(server: IndexServer) -> None:
    index = index_of(find_links=(f"{server.index}/demo/", f"{server.url}/files/{NAME}"), no_index=True)
    assert [found.url for found in index.find("demo", NAME)] == [f"{server.url}/files/{NAME}"] * 2


def test_a_remote_page_cannot_point_into_the_local_file_system(server: IndexServer, tmp_path: Path) -> None:
    server.links = tmp_path.as_uri() + "/"
    with pytest.raises(NetworkError, match="no package source has"):
        index_of(index_url=server.index).find("demo", NAME)


def test_home_is_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_url("~/wheels") == (tmp_path / "wheels").as_uri()


# -- all that a source lists


def listed(index: PackageIndex) -> list[tuple[str, str | None, int | None]]:
    results = list(index.listing("demo"))
    return [(one.filename, one.place.sha256, one.place.size) for one in results if isinstance(one, Offer)]


@pytest.mark.parametrize("style", ["html", "json"])
def test_all_files_of_a_page_are_listed(server: IndexServer, style: Literal["html", "json"]) -> None:
    server.style = style
    server.files["demo-1.0-py3-none-any.whl"] = b"wheel"
    server.advertised["demo-1.0-py3-none-any.whl"] = None
    server.yanked[NAME] = "broken"
    index = index_of(index_url=server.index)
    assert listed(index) == [(NAME, SHA, None), ("demo-1.0-py3-none-any.whl", None, None)]
    yanked = [result.yanked for result in index.listing("demo") if isinstance(result, Offer)]
    assert yanked == ["broken", None]


def test_a_folder_of_links_is_listed_without_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    (tmp_path / "other-2.0-py3-none-any.whl").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "demo-3.0.tar.gz").mkdir()
    folder = index_of(find_links=(str(tmp_path),), no_index=True)
    assert listed(folder) == [(NAME, None, len(DATA)), ("other-2.0-py3-none-any.whl", None, 1)]
    file = index_of(find_links=(str(tmp_path / NAME),), no_index=True)
    assert listed(file) == [(NAME, None, len(DATA))]


def test_a_local_page_of_links_is_listed(server: IndexServer, tmp_path: Path) -> None:
    write_page(tmp_path / "pages", f"../{NAME}#sha256={SHA}", "https://h.invalid/demo-2.0.tar.gz")
    page = index_of(find_links=(str(tmp_path / "pages" / "index.html"),), no_index=True)
    assert listed(page) == [(NAME, SHA, None), ("demo-2.0.tar.gz", None, None)]
    named = index_of(find_links=(f"{server.url}/files/{NAME}",), no_index=True)
    assert listed(named) == [(NAME, None, None)]


def test_a_remote_page_lists_no_local_files(server: IndexServer, tmp_path: Path) -> None:
    server.links = tmp_path.as_uri() + "/"
    assert listed(index_of(index_url=server.index)) == []


def test_what_could_not_be_listed_is_said(server: IndexServer, tmp_path: Path) -> None:
    server.page_statuses = [403]
    index = index_of(
        index_url=server.index,
        extra_index_urls=(tmp_path.as_uri(), "ftp://h.invalid/simple", "http://127.0.0.1:9/simple"),
    )
    misses = [result for result in index.listing("demo") if isinstance(result, Miss)]
    assert [miss.failed for miss in misses] == [True, False, True, True]


# -- connections


def basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


def authorizations(server: IndexServer, index: PackageIndex) -> list[str | None]:
    (found,) = index.find("demo", NAME)
    index.session.get(found.url).close()
    return [headers.get("authorization") for _, headers in server.requests]


def test_credentials_of_an_index_url_are_used_for_its_absolute_links(server: IndexServer) -> None:
    server.links = f"{server.url}/files/"
    index = index_of(index_url=server.index.replace("://", "://user:p%40ss@"))
    assert authorizations(server, index) == [basic("user:p@ss")] * 2


def test_credentials_do_not_go_to_another_host(server: IndexServer) -> None:
    server.links = f"{server.url}/files/".replace("127.0.0.1", "localhost")
    index = index_of(index_url=server.index.replace("://", "://user:pass@"))
    assert authorizations(server, index) == [basic("user:pass"), None]


def test_netrc_is_used_and_a_url_wins_over_it(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login joe password pw\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert authorizations(server, index_of(index_url=server.index)) == [basic("joe:pw")] * 2
    server.requests.clear()
    index = index_of(index_url=server.index.replace("://", "://user:pass@"))
    assert authorizations(server, index) == [basic("user:pass")] * 2


def test_the_configured_proxy_is_used_whatever_the_environment_says(
    server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    index = index_of(index_url="http://index.invalid/simple", proxy=server.url)
    (found,) = index.find("demo", NAME)
    assert found.url == f"http://index.invalid/files/{NAME}"
    assert [headers["host"] for _, headers in server.requests] == ["index.invalid"]


def test_the_configured_certificates_win_over_the_variables_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/from/environment.pem")
    session = IndexSession(PipConfig(cert="/from/pip.pem", client_cert="/client.pem"))
    settings = session.merge_environment_settings("https://index.invalid/", {}, None, None, None)
    assert (settings["verify"], settings["cert"]) == ("/from/pip.pem", "/client.pem")


@pytest.mark.parametrize(
    ("trusted", "url", "verified"),
    [
        ("index.invalid", "https://index.invalid/simple", False),
        ("index.invalid", "https://index.invalid:8443/simple", False),
        ("index.invalid:8443", "https://index.invalid:8443/simple", False),
        ("index.invalid:8443", "https://index.invalid/simple", True),
        ("index.invalid", "https://index.invalid.example/simple", True),
    ],
)
def test_only_trusted_hosts_go_unverified(trusted: str, url: str, *, verified: bool) -> None:
    session = IndexSession(PipConfig(trusted_hosts=(trusted,)))
    assert (type(session.get_adapter(url)).__name__ == "_VerifyingAdapter") is verified


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pass@host/simple", "https://host/simple"),
        ("https://user:p@ss@host/simple", "https://host/simple"),
        ("get http://token@host:80/a?sig=secret failed", "get http://host:80/a failed"),
        ("/srv/wheels@home", "/srv/wheels@home"),
    ],
)
def test_redact_removes_what_is_secret_in_urls(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_explain_gives_one_line() -> None:
    assert explain(OSError("two\nlines for http://me:pw@host/")) == "two lines for http://host/"
    assert explain(ValueError()) == "ValueError"
