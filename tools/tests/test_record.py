"""RECORD."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from installer.records import RecordEntry, parse_record_file

from vllm_stack.errors import IntegrityError
from vllm_stack.record import Digest, encode_hash, format_record, parse_record

HASH = encode_hash(hashlib.sha256(b"x").hexdigest())
paths = st.text(st.characters(codec="utf-8", exclude_characters="\\\r\n\0"), min_size=1)


@given(st.dictionaries(paths, st.binary(max_size=20)))
def test_what_is_written_is_read_back_also_by_installer(files: dict[str, bytes]) -> None:
    files.pop("own/RECORD", None)
    rows = {path: Digest.of(data) for path, data in files.items()}
    data = format_record(rows, "own/RECORD")
    assert parse_record(data, source="x") == {**rows, "own/RECORD": None}
    entries = [RecordEntry.from_elements(*row) for row in parse_record_file(data.decode().split("\n")[:-1])]
    assert [entry.path for entry in entries] == [*files, "own/RECORD"]
    assert all(entry.validate(files[entry.path]) for entry in entries[:-1])


BAD = [
    "a.py,md5=AAAA,1",
    f"a.py,{HASH}=,1",
    f"a.py,{HASH},-1",
    f"a.py,{HASH},01",
    f"a.py,{HASH},\u0661",
    f"a.py,{HASH},",
    "a.py,,1",
    "a.py,sha256=,1",
    "a.py,sha256=AAAA,1",
    f"a.py,{HASH[:-1]},1",
    f"a.py,{HASH[:-2]}+A,1",
    "a.py,sha256=" + base64.b64encode(b"\xff" * 32).decode().rstrip("=") + ",1",
    "a.py",
    "a.py,,,",
    f"a.py,{HASH},1\na.py,{HASH},1",
]


@pytest.mark.parametrize("row", BAD)
def test_a_row_that_is_not_as_specified_is_refused(row: str) -> None:
    with pytest.raises(IntegrityError, match="RECORD of x"):
        parse_record(f"{row}\n".encode(), source="RECORD of x")


def test_digests_of_streams_and_bytes_agree(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("digest") / "file"
    path.write_bytes(bytes(range(256)) * 10_000)
    with path.open("rb") as stream:
        assert Digest.of_stream(stream) == Digest.of(path.read_bytes())
