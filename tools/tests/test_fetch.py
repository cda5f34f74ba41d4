"""Fetching pinned files: from servers that misbehave, into a cache that several processes share."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indexserver import Answer, IndexServer, serve

from vllm_stack.cli import main
from vllm_stack.errors import IntegrityError, NetworkError, StackError, UsageError
from vllm_stack.fetch import Fetcher
from vllm_stack.index import PackageIndex
from vllm_stack.pins import PinnedFile
from vllm_stack.pip_config import PipConfig
from vllm_stack.progress import BarProgress, LineProgress, progress_for

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "demo-1.0.tar.gz"
#: A prime number of bytes, so that no block size divides it.
DATA = bytes((index * 7919 + index // 251) % 256 for index in range(600_011))
TOOLS = Path(__file__).parents[1]


def pinned(data: bytes = DATA, name: str = NAME) -> PinnedFile:
    return PinnedFile(filename=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with serve() as running:
        running.files[NAME] = DATA
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "downloads"


def fetcher(
    cache: Path, *servers: IndexServer, retries: int = 3, offline: bool = False, **options: Any
) -> Fetcher:
    indexes = [server.index for server in servers]
    config = PipConfig(
        index_url=indexes[0] if indexes else None,
        extra_index_urls=tuple(indexes[1:]),
        no_index=not indexes,
        timeout=5.0,
        retries=retries,
        **options,
    )
    progress = LineProgress(io.StringIO())
    return Fetcher(cache, offline, progress, PackageIndex(config, backoff=0), sleep=lambda _: None)


def notes(fetcher: Fetcher) -> str:
    assert isinstance(fetcher.progress, LineProgress)
    assert isinstance(fetcher.progress.stream, io.StringIO)
    return fetcher.progress.stream.getvalue()


def files_in(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*")) if cache.exists() else []


def check_only_the_file_is_there(cache: Path, file: PinnedFile, data: bytes = DATA) -> None:
    folder = cache / file.sha256
    assert files_in(cache) == [folder, folder / file.filename]
    assert (folder / file.filename).read_bytes() == data


# -- what works


def test_a_file_is_fetched_once_and_verified_again(server: IndexServer, cache: Path) -> None:
    fetch = fetcher(cache, server)
    fetched = fetch.obtain("demo", pinned())
    assert (fetched.from_cache, fetched.source) == (False, server.index)
    check_only_the_file_is_there(cache, pinned())
    server.requests.clear()
    assert fetch.obtain("demo", pinned()) == replace(fetched, from_cache=True, source=None)
    assert server.requests == []


def test_offline_takes_the_file_from_the_cache(server: IndexServer, cache: Path) -> None:
    path = fetcher(cache, server).fetch("demo", pinned())
    assert fetcher(cache, offline=True).fetch("demo", pinned()) == path


def test_a_file_is_copied_from_a_local_folder(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / NAME).write_bytes(DATA)
    fetcher(cache, find_links=(str(tmp_path / "wheels"),)).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())


def test_files_of_one_name_and_other_bytes_do_not_mix(server: IndexServer, cache: Path) -> None:
    first = fetcher(cache, server).fetch("demo", pinned())
    server.files[NAME] = b"other bytes"
    second = fetcher(cache, server).fetch("demo", pinned(b"other bytes"))
    assert (first.read_bytes(), second.read_bytes()) == (DATA, b"other bytes")


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_each_framing_of_http_works(server: IndexServer, cache: Path, framing: Any) -> None:
    server.answers = [Answer(framing=framing)]
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())


def test_a_file_without_advertised_hash_is_verified_all_the_same(server: IndexServer, cache: Path) -> None:
    server.advertised[NAME] = None
    fetcher(cache, server).fetch("demo", pinned())
    server.files[NAME] = DATA[::-1]
    with pytest.raises(IntegrityError):
        fetcher(cache / "other", server).fetch("demo", pinned())


def test_a_content_encoding_is_not_decoded(server: IndexServer, cache: Path) -> None:
    fetcher(cache, server).fetch("demo", pinned())
    assert [headers["accept-encoding"] for headers in server.file_requests] == ["identity"]


# -- transfers that break off


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_a_broken_transfer_goes_on_where_it_stopped(server: IndexServer, cache: Path, framing: Any) -> None:
    server.answers = [Answer(cut=200_001, framing=framing)]
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())
    second = server.file_requests[1]
    assert second["if-range"] == '"v1"'
    assert 0 < int(second["range"].removeprefix("bytes=").removesuffix("-")) <= 200_001


def test_a_server_without_ranges_sends_the_file_anew(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(cut=200_001), Answer(ranges=False)]
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())
    assert "range" in server.file_requests[1]


def test_a_file_that_was_replaced_meanwhile_starts_anew(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(cut=300_000, body=DATA[::-1], etag='"old"'), Answer(etag='"new"')]
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())


def test_a_replaced_file_without_validator_is_found_by_its_hash(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(cut=300_000, body=DATA[::-1], etag=None), Answer(etag=None)]
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())
    assert ["range" in headers for headers in server.file_requests] == [False, True, False]


@pytest.mark.parametrize(
    "content_range", ["bytes 0-9/10", f"bytes 7-{len(DATA) - 1}/{len(DATA)}", "rubbish", ""]
)
def test_a_range_that_does_not_fit_is_not_used(server: IndexServer, cache: Path, content_range: str) -> None:
    server.answers = [Answer(cut=300_000), Answer(content_range=content_range or "bytes */*")]
    fetcher(cache, server, retries=1).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())
    assert ["range" in headers for headers in server.file_requests] == [False, True, False]


def test_a_transfer_that_always_breaks_is_given_up(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(cut=0)] * 9
    waits: list[float] = []
    fetch = replace(fetcher(cache, server, retries=3), sleep=waits.append)
    assert fetch.index is not None
    fetch.index.backoff = 20.0
    with pytest.raises(NetworkError) as caught:
        fetch.fetch("demo", pinned())
    assert "broke off 4 times" in caught.value.details[0]
    assert waits == [20.0, 30.0, 30.0]
    assert files_in(cache) == []


def test_progress_earns_further_tries(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(cut=70_000, chunk=10_000)] * 8
    fetcher(cache, server, retries=1).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())


def test_an_answer_500_is_tried_again(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(status=500), Answer(status=503)]
    fetcher(cache, server).fetch("demo", pinned())
    assert len(server.file_requests) == 3


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_status_that_stays_is_a_network_error(server: IndexServer, cache: Path, status: int) -> None:
    server.answers = [Answer(status=status)] * 9
    with pytest.raises(NetworkError) as caught:
        fetcher(cache, server).fetch("demo", pinned())
    assert f"HTTP {status}" in caught.value.details[0]
    assert server.index in caught.value.details[0]
    assert files_in(cache) == []


def test_the_next_source_is_asked_when_one_cannot_give_the_file(server: IndexServer, cache: Path) -> None:
    with serve() as broken:
        broken.files[NAME] = DATA
        broken.answers = [Answer(status=404)]
        assert fetcher(cache, broken, server).obtain("demo", pinned()).source == server.index
    check_only_the_file_is_there(cache, pinned())


# -- wrong bytes


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(body=DATA[:-1] + b"\0"), id="other bytes"),
        pytest.param(Answer(body=DATA[:-1]), id="shorter"),
        pytest.param(Answer(body=DATA[:-1], framing="chunked"), id="shorter, length not told"),
        pytest.param(Answer(body=DATA + b"x"), id="longer"),
        pytest.param(Answer(body=DATA + b"x", framing="chunked"), id="longer, length not told"),
        pytest.param(Answer(body=DATA + b"x", framing="close"), id="longer, not framed"),
        pytest.param(Answer(body=b""), id="empty"),
        pytest.param(
            Answer(body=b"<html>Sign in</html>", content_type="text/html"), id="error page with 200"
        ),
    ],
)
def test_wrong_bytes_leave_nothing_behind(server: IndexServer, cache: Path, answer: Answer) -> None:
    server.answers = [answer]
    with pytest.raises(IntegrityError) as caught:
        fetcher(cache, server).fetch("demo", pinned())
    assert pinned().sha256 in caught.value.message
    assert server.index in caught.value.message
    assert files_in(cache) == []
    assert len(server.file_requests) == 1


def test_the_error_names_the_actual_hash(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(body=DATA[::-1])]
    with pytest.raises(IntegrityError, match=hashlib.sha256(DATA[::-1]).hexdigest()):
        fetcher(cache, server).fetch("demo", pinned())


def test_an_error_page_is_called_one(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(body=b"<html/>", content_type="text/html")]
    with pytest.raises(IntegrityError, match="7 bytes of text/html"):
        fetcher(cache, server).fetch("demo", pinned())


def test_a_file_that_always_ends_early_is_no_endless_loop(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(body=DATA[:-1], framing="close", ranges=False)] * 9
    with pytest.raises(NetworkError, match="no package source"):
        fetcher(cache, server, retries=2).fetch("demo", pinned())
    assert files_in(cache) == []


def test_another_advertised_hash_is_refused_before_the_download(server: IndexServer, cache: Path) -> None:
    server.advertised[NAME] = "ab" * 32
    with pytest.raises(IntegrityError) as caught:
        fetcher(cache, server).fetch("demo", pinned())
    for part in (server.index, "ab" * 32, pinned().sha256):
        assert part in caught.value.message
    assert server.file_requests == []
    assert files_in(cache) == []


@pytest.mark.parametrize("lie", ["index", "file"])
def test_a_source_with_the_right_bytes_is_found_behind_a_wrong_one(
    server: IndexServer, cache: Path, lie: str
) -> None:
    with serve() as wrong:
        wrong.files[NAME] = DATA
        if lie == "index":
            wrong.advertised[NAME] = "ab" * 32
        else:
            wrong.answers = [Answer(body=DATA[::-1])]
        fetch = fetcher(cache, wrong, server)
        assert fetch.obtain("demo", pinned()).source == server.index
        assert wrong.index in notes(fetch)
    check_only_the_file_is_there(cache, pinned())


def test_a_local_file_of_other_length_or_bytes_is_refused(tmp_path: Path, cache: Path) -> None:
    for data in (DATA[:-1], DATA[::-1]):
        (tmp_path / NAME).write_bytes(data)
        with pytest.raises(IntegrityError):
            fetcher(cache, find_links=(str(tmp_path),)).fetch("demo", pinned())
        assert files_in(cache) == []


# -- the cache


@pytest.mark.parametrize("damage", [DATA[:-1], DATA[:-1] + b"\0", b""])
def test_a_corrupt_cached_file_is_fetched_anew(server: IndexServer, cache: Path, damage: bytes) -> None:
    fetch = fetcher(cache, server)
    fetch.fetch("demo", pinned()).write_bytes(damage)
    assert not fetch.obtain("demo", pinned()).from_cache
    check_only_the_file_is_there(cache, pinned())
    assert "removed" in notes(fetch)


def test_a_corrupt_cached_file_is_removed_offline_too(server: IndexServer, cache: Path) -> None:
    path = fetcher(cache, server).fetch("demo", pinned())
    path.write_bytes(DATA[::-1])
    with pytest.raises(IntegrityError, match=pinned().sha256):
        fetcher(cache, offline=True).fetch("demo", pinned())
    assert not path.exists()


def test_offline_names_what_is_missing_and_asks_nobody(server: IndexServer, cache: Path) -> None:
    with pytest.raises(NetworkError, match=NAME) as caught:
        fetcher(cache, server, offline=True).fetch("demo", pinned())
    assert "vllm-stack fetch" in str(caught.value.hint)
    assert server.requests == []
    assert files_in(cache) == []


@pytest.mark.parametrize("place", ["file", "/proc/self"])
def test_a_cache_that_cannot_be_written_is_a_clear_error(
    server: IndexServer, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot .* cache") as caught:
        fetcher(tmp_path / place / "downloads", server).fetch("demo", pinned())
    assert "--cache-dir" in str(caught.value.hint)
    assert (tmp_path / "file").read_text() == "in the way"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let the kernel refuse to write more, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_is_a_clear_error_and_leaves_nothing(server: IndexServer, cache: Path) -> None:
    with file_size_limit(300_000), pytest.raises(UsageError, match="File too large") as caught:
        fetcher(cache, server).fetch("demo", pinned())
    assert "make room" in str(caught.value.hint)
    assert files_in(cache) == []


def part_of(cache: Path) -> Path:
    folder = cache / pinned().sha256
    folder.mkdir(parents=True)
    return folder / f".{NAME}.part"


def test_what_a_killed_process_received_is_used(server: IndexServer, cache: Path) -> None:
    part_of(cache).write_bytes(DATA[:400_000])
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())
    assert [headers["range"] for headers in server.file_requests] == ["bytes=400000-"]


@pytest.mark.parametrize("left", [b"rubbish", DATA[::-1], DATA + b"x", DATA])
@pytest.mark.parametrize("retries", [0, 2])
def test_rubbish_that_a_killed_process_left_does_no_harm(
    server: IndexServer, cache: Path, left: bytes, retries: int
) -> None:
    part_of(cache).write_bytes(left)
    fetcher(cache, server, retries=retries).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())


def test_an_interrupt_keeps_what_arrived_for_the_next_run(server: IndexServer, cache: Path) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    server.answers = [Answer(cut=300_000)]
    fetch = replace(fetcher(cache, server), sleep=interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("demo", pinned())
    assert not fetch.path_of(pinned()).exists()
    fetcher(cache, server).fetch("demo", pinned())
    check_only_the_file_is_there(cache, pinned())
    assert "range" in server.file_requests[-1]


def test_a_symbolic_link_as_part_file_is_not_followed(
    server: IndexServer, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("precious")
    part_of(cache).symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError):
        fetcher(cache, server).fetch("demo", pinned())
    assert (tmp_path / "precious").read_text() == "precious"


# -- several processes


def start_process(cache: Path, server: IndexServer) -> subprocess.Popen[str]:
    program = (
        "import sys; from pathlib import Path; from vllm_stack.fetch import Fetcher\n"
        "from vllm_stack.index import PackageIndex; from vllm_stack.pins import PinnedFile\n"
        "from vllm_stack.pip_config import PipConfig\n"
        "index = PackageIndex(PipConfig(index_url=sys.argv[2]))\n"
        "file = PinnedFile(filename=sys.argv[3], sha256=sys.argv[4], size=int(sys.argv[5]))\n"
        "print(Fetcher(Path(sys.argv[1]), index=index).obtain('demo', file).from_cache)\n"
    )
    arguments = [str(cache), server.index, NAME, pinned().sha256, str(len(DATA))]
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
    )


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_that_want_one_file_fetch_it_once(server: IndexServer, cache: Path) -> None:
    gate = threading.Event()
    server.answers = [Answer(gate=gate)]
    processes = [start_process(cache, server) for _ in range(3)]
    lines: list[str] = []
    readers = [
        threading.Thread(target=lambda pipe=process.stderr: lines.extend(pipe or ())) for process in processes
    ]
    for reader in readers:
        reader.start()
    # The two that wait say so; which two is open.
    wait_until(lambda: sum("another process is fetching" in line for line in lines) == 2)
    gate.set()
    for reader in readers:
        reader.join()
    outputs = [process.communicate()[0] for process in processes]
    assert sorted(outputs) == ["False\n", "True\n", "True\n"]
    assert len(server.file_requests) == 1
    check_only_the_file_is_there(cache, pinned())


def test_whoever_waits_fetches_the_file_when_the_first_one_fails(server: IndexServer, cache: Path) -> None:
    gate = threading.Event()
    server.answers = [Answer(gate=gate, body=DATA[::-1])]
    first, second = fetcher(cache, server), fetcher(cache, server)
    results: list[object] = []

    def fetch(one: Fetcher) -> None:
        try:
            results.append(one.obtain("demo", pinned()).from_cache)
        except StackError as error:
            results.append(type(error))

    threads = [threading.Thread(target=fetch, args=(one,)) for one in (first, second)]
    threads[0].start()
    wait_until(lambda: server.file_requests)
    threads[1].start()
    wait_until(lambda: "another process" in notes(second))
    gate.set()
    for thread in threads:
        thread.join()
    assert results == [IntegrityError, False]
    check_only_the_file_is_there(cache, pinned())


def test_the_next_process_goes_on_when_the_first_is_killed(server: IndexServer, cache: Path) -> None:
    gate = threading.Event()
    server.answers = [Answer(cut=400_000, chunk=400_000), Answer(gate=gate)]
    first = start_process(cache, server)
    wait_until(lambda: len(server.file_requests) == 2)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    gate.set()
    second = start_process(cache, server)
    assert second.communicate()[0] == "False\n"
    assert int(server.file_requests[2]["range"].removeprefix("bytes=").removesuffix("-")) > 0
    check_only_the_file_is_there(cache, pinned())


# -- any way of breaking

ANSWERS = st.builds(
    Answer,
    status=st.sampled_from([200, 200, 200, 200, 404]),
    cut=st.one_of(st.none(), st.integers(0, 40)),
    framing=st.sampled_from(["length", "chunked", "close"]),
    ranges=st.booleans(),
    etag=st.sampled_from(['"v1"', '"v2"', 'W/"v1"', None]),
    chunk=st.integers(1, 50),
    body=st.one_of(st.none(), st.none(), st.binary(max_size=60)),
    content_range=st.sampled_from([None, None, "bytes 0-3/4", "rubbish"]),
)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[IndexServer]:
    with serve() as running:
        yield running


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    data=st.binary(min_size=1, max_size=60),
    answers=st.lists(ANSWERS, max_size=6),
    left=st.one_of(st.none(), st.binary(max_size=70)),
    retries=st.integers(0, 3),
)
def test_however_a_transfer_goes_the_file_is_right_or_nothing_is_left(
    shared_server: IndexServer,
    tmp_path_factory: pytest.TempPathFactory,
    data: bytes,
    answers: list[Answer],
    left: bytes | None,
    retries: int,
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    file = pinned(data)
    if left is not None:
        (cache / file.sha256).mkdir()
        (cache / file.sha256 / f".{NAME}.part").write_bytes(left)
    shared_server.files = {NAME: data}
    shared_server.answers = list(answers)
    try:
        fetcher(cache, shared_server, retries=retries).fetch("demo", file)
    except (NetworkError, IntegrityError):
        assert files_in(cache) == []
        assert answers  # a server that behaves gives the file
    else:
        check_only_the_file_is_there(cache, file, data)


# -- progress


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, interval=0)
    with progress.transfer("demo", 2_000_000) as advance:
        advance(500_000)
    assert progress_for(stream) == LineProgress(stream)
    assert stream.getvalue().splitlines()[:2] == ["demo: 2.0 MB", "demo: 500.0 kB of 2.0 MB (25 %)"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = progress_for(stream)
    assert isinstance(progress, BarProgress)
    progress.note("a note")
    with progress.transfer("demo", 100) as advance:
        advance(50)
    assert "demo" in stream.getvalue()
    assert "a note\n" in stream.getvalue()


def test_a_failed_transfer_is_not_called_complete(server: IndexServer, cache: Path) -> None:
    server.answers = [Answer(body=DATA[::-1])]
    fetch = fetcher(cache, server)
    with pytest.raises(IntegrityError):
        fetch.fetch("demo", pinned())
    assert "complete" not in notes(fetch)


def test_credentials_are_in_no_message(server: IndexServer, cache: Path) -> None:
    fetch = fetcher(cache, server)
    assert fetch.index is not None
    secret = server.index.replace("://", "://user:secret@")
    fetch = replace(fetch, index=PackageIndex(replace(fetch.index.config, index_url=secret), backoff=0))
    server.answers = [Answer(body=DATA[::-1])]
    with pytest.raises(StackError) as caught:
        fetch.fetch("demo", pinned())
    fetched = fetch.obtain("demo", pinned())
    assert "secret" not in f"{caught.value.__dict__}{notes(fetch)}{fetched}"


# -- the command

WHEELS = {arch: f"demo-1.0-py3-none-manylinux_2_28_{arch}.whl" for arch in ("x86_64", "aarch64")}


@pytest.fixture
def stack(tmp_path: Path, server: IndexServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack repository with one target, whose files the server has."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.index)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    server.files.update({name: arch.encode() for arch, name in WHEELS.items()})
    tables = [_table("[sdist]", pinned())]
    for arch, name in WHEELS.items():
        tables.append(_table(f'[[wheels]]\narch = "{arch}"', pinned(arch.encode(), name)))
    (tmp_path / "upstream").mkdir()
    (tmp_path / "upstream" / "demo.toml").write_text(
        'schema = 1\ndistribution = "demo"\nrelease = "1.0"\ngit = "https://git.invalid/demo"\ntag = "v1.0"\n'
        + "".join(tables)
        + '[layout]\npackage = "demo"\n'
    )
    return tmp_path


def _table(head: str, file: PinnedFile) -> str:
    return f'{head}\nfilename = "{file.filename}"\nsha256 = "{file.sha256}"\nsize = {file.size}\n'


def run_command(stack: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    report = stack / "report.json"
    code: int | str | None = 0
    try:
        main(
            [
                "fetch",
                "--root",
                str(stack),
                "--cache-dir",
                str(stack / "cache"),
                "--json",
                str(report),
                *arguments,
            ]
        )
    except SystemExit as end:
        code = end.code
    assert isinstance(code, int)
    return code, json.loads(report.read_text())


def test_the_command_fetches_sdist_and_the_wheel_of_this_machine(stack: Path, server: IndexServer) -> None:
    code, report = run_command(stack)
    assert code == 0
    assert [(file["filename"], file["from_cache"], file["source"]) for file in report["files"]] == [
        (NAME, False, server.index),
        (WHEELS["aarch64"], False, server.index),
    ]
    for file in report["files"]:
        data = Path(file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])


def test_the_command_works_offline_from_the_cache_alone(stack: Path, server: IndexServer) -> None:
    assert run_command(stack, "--all-arches")[0] == 0
    server.requests.clear()
    code, report = run_command(stack, "--all-arches", "--offline")
    assert (code, [file["from_cache"] for file in report["files"]]) == (0, [True, True, True])
    assert server.requests == []


def test_the_command_fetches_the_named_architecture(stack: Path) -> None:
    _, report = run_command(stack, "--arch", "x86_64", "--target", "demo")
    assert [file["filename"] for file in report["files"]] == [NAME, WHEELS["x86_64"]]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["--offline"], 3, "network"),
        (["--arch", "x86_64", "--all-arches"], 2, "usage"),
        (["--target", "other"], 2, "usage"),
    ],
)
def test_the_command_ends_with_the_documented_code(
    stack: Path, arguments: list[str], code: int, kind: str
) -> None:
    actual, report = run_command(stack, *arguments)
    assert (actual, report["error"]["kind"]) == (code, kind)


def test_the_command_reports_wrong_bytes_with_code_4(stack: Path, server: IndexServer) -> None:
    server.files[NAME] = DATA[::-1]
    code, report = run_command(stack)
    assert (code, report["error"]["exit_code"]) == (4, 4)


def test_an_unknown_machine_must_name_an_architecture(stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    code, report = run_command(stack)
    assert (code, report["error"]["hint"]) == (2, "name one with --arch: x86_64, aarch64")


def test_the_command_prints_what_it_has(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(stack)
    assert pinned().sha256 in capsys.readouterr().out
    run_command(stack, "--offline")
    assert f"{NAME}  {len(DATA)} bytes, cached" in capsys.readouterr().out
