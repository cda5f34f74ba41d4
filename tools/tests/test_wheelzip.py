"""Reading and writing wheels, down to the bytes of the zip format."""

from __future__ import annotations

import io
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installer.sources import WheelFile

from vllm_stack.errors import BuildError, IntegrityError
from vllm_stack.record import Digest
from vllm_stack.wheelwriter import Limits, create_wheel
from vllm_stack.wheelzip import END, WheelArchive

NAME = "demo-1.0-py3-none-any.whl"
INFO = "demo-1.0.dist-info"
LOW = Limits(size=100, count=3)
TOOLS = Path(__file__).parents[1]
names = st.lists(
    st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters='\\/:"'), min_size=1),
    min_size=1,
    max_size=3,
)
safe = names.filter(lambda parts: not {".", ".."} & set(parts)).map("/".join)
files = st.dictionaries(safe, st.tuples(st.binary(max_size=300), st.booleans()), max_size=8)


def archive_of(members: dict[str, bytes], *, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), data, method)
    return raw.getvalue()


def read_all(data: bytes) -> dict[str, bytes]:
    archive = WheelArchive(io.BytesIO(data), "x.whl")
    return {name: archive.read(name) for name in archive.members}


def fault(data: bytes) -> str:
    with pytest.raises(IntegrityError) as caught:
        read_all(data)
    return caught.value.message


MEMBERS = {"a/one.py": b"one = 1\n" * 50, "a/two.py": b"", "b.so": bytes(range(256)) * 4}


@given(files)
def test_any_members_are_read_and_copied_without_packing_them_again(
    content: dict[str, tuple[bytes, bool]],
) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as source:
        for name, (data, packed) in content.items():
            source.writestr(
                zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            )
    archive = WheelArchive(raw, "x.whl")
    assert {name: archive.read(name) for name in archive.members} == {
        name: data for name, (data, _) in content.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        # A copy that packed anything would need one of these.
        patch.setattr(zlib, "compressobj", None)
        patch.setattr(zlib, "decompressobj", None)
        copied = write(archive, Limits())
        assert write(archive, Limits()) == copied
    for made in (copied, write(archive, LOW)):
        check_copy(raw.getvalue(), made, {name: data for name, (data, _) in content.items()})


def write(source: WheelArchive, limits: Limits) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, NAME)
        with create_wheel(path, limits=limits) as writer:
            for name in source.members:
                member = source.member(name)
                digest = Digest("0" * 64, member.size)
                writer.copy(source, name, digest)
            writer.add(f"{INFO}/METADATA", b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
            writer.add(f"{INFO}/WHEEL", b"Wheel-Version: 1.0\n")
        data = path.read_bytes()
        assert (writer.size, writer.sha256) == (len(data), Digest.of(data).sha256)
        return data


def check_copy(original: bytes, copy: bytes, content: dict[str, bytes]) -> None:
    with zipfile.ZipFile(io.BytesIO(original)) as old, zipfile.ZipFile(io.BytesIO(copy)) as new:
        assert new.testzip() is None
        for name, data in content.items():
            assert new.read(name) == data
            one, two = old.getinfo(name), new.getinfo(name)
            for field in ("compress_type", "compress_size", "CRC", "date_time", "file_size"):
                assert getattr(one, field) == getattr(two, field)
        assert new.namelist()[-1] == f"{INFO}/RECORD"
    assert read_all(copy).keys() == {*content, f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD"}


def test_a_written_wheel_satisfies_installer(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with create_wheel(path) as writer:
        writer.add("demo/ä, b.py", b"x = 1\n")
        writer.add("demo/run", b"#!", executable=True)
        writer.add(f"{INFO}/METADATA", b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        writer.add(f"{INFO}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    with WheelFile.open(path) as wheel:
        wheel.validate_record()
    with zipfile.ZipFile(path) as archive:
        modes = {item.filename: item.external_attr >> 16 for item in archive.infolist()}
        assert {item.compress_type for item in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {item.date_time for item in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert modes["demo/run"] == 0o100755
    assert modes["demo/ä, b.py"] == 0o100644


def test_a_wheel_cut_off_anywhere_is_refused() -> None:
    data = archive_of(MEMBERS)
    for size in range(len(data)):
        assert "x.whl" in fault(data[:size])


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_is_refused_or_changes_nothing_that_is_read(method: int, bit: int) -> None:
    data = archive_of(MEMBERS, method=method)
    silent = []
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        try:
            assert read_all(bytes(damaged)) == MEMBERS
        except IntegrityError:
            continue
        silent.append(at)
    start = END.unpack(data[-END.size :])[6]
    allowed = set()
    for position in central_entries(data, start):
        # Version that made it, internal and external attributes: none is content, and a type is checked.
        allowed |= {position + offset for offset in (4, 5, 36, 37, 38, 39, 40, 41)}
    if method == zipfile.ZIP_DEFLATED:
        # The last byte of a deflate stream may have bits left over.
        members = WheelArchive(io.BytesIO(data), "x.whl").members.values()
        allowed |= {member.data_offset + member.compressed_size - 1 for member in members}
    assert set(silent) <= allowed
    assert silent, "the test must have met bytes that only describe"


def central_entries(data: bytes, position: int) -> list[int]:
    found = []
    while data[position : position + 4] == b"PK\1\2":
        found.append(position)
        sizes = struct.unpack_from("<3H", data, position + 28)
        position += 46 + sum(sizes)
    return found


def test_damage_names_the_member() -> None:
    data = bytearray(archive_of(MEMBERS))
    at = data.index(b"a/one.py") + len("a/one.py") + 3
    data[at] ^= 0xFF
    assert "a/one.py: its data is damaged" in fault(bytes(data))
    stored = archive_of(MEMBERS, method=zipfile.ZIP_STORED).replace(b"one = 1", b"two = 2", 1)
    assert "a/one.py: its data is damaged" in fault(stored)


UNSAFE = ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "C:/x", "a/\x01", "a/\u202e.py", ".."]


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names_are_refused(name: str) -> None:
    assert repr(name) in fault(archive_of({name: b""}))


def test_a_name_cut_at_a_null_is_refused() -> None:
    data = archive_of({"a_b.py": b""}).replace(b"a_b.py", b"a\0b.py")
    assert "'a\\x00b.py'" in fault(data)


def test_two_members_of_one_name_are_refused() -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("a.py", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.py", b"2")
    assert "a.py: there are two members" in fault(raw.getvalue())


def patched(data: bytes, offset: int, value: int, width: str = "<H") -> bytes:
    """Write a field into the local header and the same into the directory's entry."""
    changed = bytearray(data)
    start = END.unpack(data[-END.size :])[6]
    struct.pack_into(width, changed, offset, value)
    struct.pack_into(width, changed, start + offset + 2, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (6, 0x1, "encrypted"),
        (6, 0x40, "encrypted"),
        (6, 0x8, "data descriptor"),
        (6, 0x4000, "unknown flags"),
        (8, 12, "unknown compression"),
        (8, 99, "unknown compression"),
    ],
)
def test_what_wheels_have_no_use_for_is_refused(offset: int, value: int, text: str) -> None:
    message = fault(patched(archive_of({"a.py": b"x" * 40}), offset, value))
    assert "a.py" in message
    assert text in message


def test_a_real_data_descriptor_is_refused() -> None:
    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(data)  # type: ignore[arg-type]

    stream = Stream()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.py", b"1")
    assert "a.py" in fault(stream.data)
    assert "data descriptor" in fault(stream.data)


def test_links_are_refused_and_folders_are_no_files() -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("a/", b"")
        archive.writestr("a/b.py", b"1")
    assert read_all(raw.getvalue()) == {"a/b.py": b"1"}
    link = zipfile.ZipInfo("a/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(raw, "a") as archive:
        archive.writestr(link, b"/etc/passwd")
    assert "a/link" in fault(raw.getvalue())
    with_content = archive_of({"a_": b"1"}).replace(b"a_", b"a/")
    assert "a folder with content" in fault(with_content)


def test_bytes_outside_of_members_are_refused() -> None:
    data = archive_of(MEMBERS)
    start = END.unpack(data[-END.size :])[6]
    assert fault(b"#!/bin/sh\n" + data)
    assert fault(data + b"\0")
    # A gap before the directory, with all offsets right.
    end = list(END.unpack(data[-END.size :]))
    end[6] += 5
    gap = data[:start] + b"hello" + data[start : -END.size] + END.pack(*end)
    with zipfile.ZipFile(io.BytesIO(gap)) as lenient:
        assert lenient.testzip() is None
    assert "5 bytes between" in fault(gap)
    end[3] = end[4] = len(MEMBERS) - 1  # a member more than the end counts
    end[6] = start
    assert "3 members, its end says 2" in fault(data[: -END.size] + END.pack(*end))
    raw = io.BytesIO(data)
    with zipfile.ZipFile(raw, "a") as archive:
        archive.comment = b"hidden"
    assert fault(raw.getvalue())


def test_bytes_behind_the_end_of_a_compressed_stream_are_refused() -> None:
    packer = zlib.compressobj(9, wbits=-15)
    stream = packer.compress(b"x = 1\n") + packer.flush()
    for hidden, good in ((b"", True), (b"hidden", False)):
        data = archive_of({"a.py": stream + hidden}, method=zipfile.ZIP_STORED)
        for offset, value, width in ((8, 8, "<H"), (14, zlib.crc32(b"x = 1\n"), "<L"), (22, 6, "<L")):
            data = patched(data, offset, value, width)
        with zipfile.ZipFile(io.BytesIO(data)) as lenient:
            assert lenient.testzip() is None
        if good:
            assert read_all(data) == {"a.py": b"x = 1\n"}
        else:
            assert "a.py: its compressed data does not end" in fault(data)


def test_a_small_member_cannot_unpack_to_gigabytes() -> None:
    packer = zlib.compressobj(9, wbits=-15)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    data = bytearray(archive_of({"a.py": bomb}, method=zipfile.ZIP_STORED))
    data = bytearray(patched(bytes(data), 8, zipfile.ZIP_DEFLATED))
    tracemalloc.start()
    try:
        assert "a.py" in fault(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_member_of_more_than_four_gigabytes_is_copied(tmp_path: Path) -> None:
    """The stream repeats one block of zeros, so that the test packs 64 MiB and not 4 GiB."""
    block, count = bytes(1 << 26), 65
    packer = zlib.compressobj(6, wbits=-15)
    part = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    stream = part * count + packer.flush()
    crc = 0
    for _ in range(count):
        crc = zlib.crc32(block, crc)
    size = len(block) * count
    name = b"big.bin"
    extra = struct.pack("<2H2Q", 1, 16, size, len(stream))
    common = (45, 0, 8, 0, 33, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra))
    local = struct.pack("<4s5H3L2H", b"PK\3\4", *common) + name + extra
    central = struct.pack("<4s6H3L5H2L", b"PK\1\2", 0x32D, *common, 0, 0, 0, 0o100644 << 16, 0) + name + extra
    start = len(local) + len(stream)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(central), start, 0)
    source = tmp_path / "source.whl"
    source.write_bytes(local + stream + central + end)
    copy = tmp_path / NAME
    with WheelArchive.open(source) as archive, create_wheel(copy) as writer:
        assert archive.member("big.bin").size == size > 1 << 32
        writer.copy(archive, "big.bin", Digest("0" * 64, size))
        writer.add(f"{INFO}/METADATA", b"Name: demo\n")
        writer.add(f"{INFO}/WHEEL", b"Wheel-Version: 1.0\n")
    with zipfile.ZipFile(copy) as archive_, archive_.open("big.bin") as file:
        assert archive_.getinfo("big.bin").file_size == size
        assert file.read(5) == bytes(5)
    with WheelArchive.open(copy) as again:
        assert b"".join(again.raw(again.member("big.bin"))) == stream


def test_more_members_than_sixteen_bits_count(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with create_wheel(path) as writer:
        for number in range(65_600):
            writer.add(f"d/{number}", b"")
        writer.add(f"{INFO}/METADATA", b"Name: demo\n")
        writer.add(f"{INFO}/WHEEL", b"Wheel-Version: 1.0\n")
    with WheelArchive.open(path) as archive:
        assert len(archive.members) == 65_603
    with zipfile.ZipFile(path) as lenient:
        assert len(lenient.infolist()) == 65_603


def test_the_end_of_a_large_archive_is_checked(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with create_wheel(path, limits=LOW) as writer:
        writer.add("demo.py", b"x" * 200)
        writer.add(f"{INFO}/METADATA", b"Name: demo\n")
        writer.add(f"{INFO}/WHEEL", b"Wheel-Version: 1.0\n")
    data = path.read_bytes()
    content = read_all(data)
    tail = data.index(b"PK\6\6")
    for at in range(tail, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        if at - tail in range(12, 16):  # version that made it, version needed: nothing reads them
            assert read_all(bytes(damaged)) == content
        else:
            assert fault(bytes(damaged))


def write_files(path: Path, added: list[str], failure: Exception | None = None) -> None:
    with create_wheel(path) as writer:
        for name in added:
            writer.add(name, b"")
        if failure is not None:
            raise failure


def test_a_writer_leaves_nothing_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        write_files(tmp_path / NAME, ["demo.py"], RuntimeError("stop"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (["demo.py", f"{INFO}/WHEEL"], "no demo-1.0.dist-info/METADATA"),
        (["demo.py", f"{INFO}/METADATA"], "no demo-1.0.dist-info/WHEEL"),
        (["demo.py", "demo.py"], "twice"),
        ([f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD"], "RECORD"),
        ([f"{INFO}/METADATA", f"{INFO}/WHEEL", "../evil.py"], "damaged"),
    ],
)
def test_a_writer_leaves_no_wheel_that_is_not_valid(tmp_path: Path, added: list[str], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        write_files(tmp_path / NAME, added)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["demo.whl", "demo-1.0.zip", "demo-x y-py3-none-any.whl"])
def test_a_file_name_that_no_wheel_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError), create_wheel(tmp_path / name):
        pass
    assert list(tmp_path.iterdir()) == []


_FILL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vllm_stack.errors import BuildError
from vllm_stack.wheelwriter import create_wheel
try:
    with create_wheel(Path(sys.argv[2])) as writer:
        for number in range(64):
            writer.add(f"demo/{number}", bytes(4096))
except BuildError as error:
    print(error.message, "|", error.hint)
    sys.exit(7)
"""


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_limit_on_file_sizes_ends_in_a_build_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FILL, str(TOOLS), str(tmp_path / NAME)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_limit_files)
    assert done.returncode == 7, done.stderr
    assert "cannot write" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_ends_in_a_build_error(tmp_path: Path) -> None:
    """A file system of 64 KiB, in a mount namespace of its own."""
    listing = tmp_path / "left"
    script = (
        'mount -t tmpfs -o size=64k none "$1" && { "$2" -c "$3" "$4" "$1/$5"; code=$?; '
        'ls -A "$1" > "$6"; exit $code; }'
    )
    full = tmp_path / "full"
    full.mkdir()
    words = [str(full), sys.executable, _FILL, str(TOOLS), NAME, str(listing)]
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "sh", "-c", script, "sh", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert os.strerror(28) in done.stdout
    assert listing.read_text() == ""


@pytest.mark.parametrize("folder", ["/proc", "/dev/null", "/nonexistent"])
def test_a_folder_that_takes_no_files_ends_in_a_build_error(folder: str) -> None:
    with pytest.raises(BuildError, match="cannot write"), create_wheel(Path(folder, NAME)) as writer:
        writer.add("demo.py", b"")


def test_the_head_of_a_member_needs_no_more_than_itself() -> None:
    data = bytearray(archive_of({"a.so": os.urandom(100_000)}))
    archive = WheelArchive(io.BytesIO(bytes(data)), "x.whl")
    head = archive.head("a.so", 20)
    assert head == archive.read("a.so")[:20]
    data[90_000] ^= 0xFF
    assert WheelArchive(io.BytesIO(bytes(data)), "x.whl").head("a.so", 20) == head
    assert WheelArchive(io.BytesIO(archive_of({"a": b"xy"})), "x.whl").head("a", 20) == b"xy"


@settings(max_examples=200)
@given(st.data())
def test_any_garbage_is_refused_or_read(data: st.DataObject) -> None:
    raw = bytearray(archive_of(MEMBERS))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        read_all(bytes(raw))
    except IntegrityError as error:
        assert error.message.startswith("x.whl")  # noqa: PT017 - any other exception fails the test
