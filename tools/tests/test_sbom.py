"""The wheel's bill of materials."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cyclonedx.model.bom import Bom
from hypothesis import given
from hypothesis import strategies as st
from wheelkit import STACK_ID, Kit, make_patch

from vllm_stack.errors import IntegrityError
from vllm_stack.hashing import sha256_bytes
from vllm_stack.sbom import Materials, read_sbom, write_sbom

if TYPE_CHECKING:
    from vllm_stack.patch import Patch

#: 2026-11-01 09:43:04, as the zip format has it.
TIME = ((46 << 9 | 11 << 5 | 1) << 16) | (9 << 11 | 43 << 5 | 2)
#: More than ten, and not in the order of their names.
PATCHES = tuple(
    make_patch(f"{number:04}-x.patch", f"[X] Patch {number}") for number in (300, 100, 200, *range(1, 12))
)


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit.make(tmp_path_factory.mktemp("kit"))


def materials(kit: Kit, patches: tuple[Patch, ...] = PATCHES) -> Materials:
    return Materials(
        target="demo-target",
        distribution="demo",
        version="1.0.0+bw.1",
        stack_id=STACK_ID,
        official_file=kit.official.name,
        official_sha256=kit.pin.wheels[0].sha256,
        patches=tuple((patch.name, patch.sha256) for patch in patches),
        files={"demo/a.py": sha256_bytes(b"a"), "demo/ü b.py": sha256_bytes(b"b")},
        removed=("demo/z.py", "demo/c.py"),
    )


def written(kit: Kit, patches: tuple[Patch, ...] = PATCHES) -> bytes:
    return write_sbom(materials(kit, patches), kit.pin, kit.pin.wheels[0], patches, TIME)


def test_what_is_written_is_read_back(kit: Kit) -> None:
    assert read_sbom(written(kit)) == materials(kit)
    assert written(kit) == written(kit)
    one = materials(kit, PATCHES[:1])
    assert read_sbom(written(kit, PATCHES[:1])) == one


def test_the_document_names_the_official_wheel_and_carries_the_patches(kit: Kit) -> None:
    document: dict[str, Any] = json.loads(written(kit))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    root = document["metadata"]["component"]
    assert root["purl"] == "pkg:pypi/demo@1.0.0%2Bbw.1"
    (official,) = root["pedigree"]["ancestors"]
    assert official["version"] == "1.0.0"
    assert official["hashes"] == [{"alg": "SHA-256", "content": sha256_bytes(kit.official.read_bytes())}]
    texts = [patch["diff"]["text"]["content"] for patch in root["pedigree"]["patches"]]
    assert sorted(texts) == sorted(patch.data.decode() for patch in PATCHES)
    assert {patch["type"] for patch in root["pedigree"]["patches"]} == {"unofficial"}
    assert document["metadata"]["timestamp"].startswith("2026-11-01T09:43:04")


def test_the_library_reads_its_own_format_back(kit: Kit) -> None:
    bom = Bom.from_json(json.loads(written(kit)))  # type: ignore[attr-defined]
    component = bom.metadata.component
    assert component.name == "demo"
    assert len(component.pedigree.patches) == len(PATCHES)
    assert {item.name for item in component.components} == set(materials(kit).files)


def test_each_stack_has_its_own_serial_number(kit: Kit) -> None:
    base = materials(kit)
    others = [base, replace(base, stack_id="0" * 64), replace(base, version="1.0.0+bw.2")]
    serials = [
        json.loads(write_sbom(item, kit.pin, kit.pin.wheels[0], PATCHES, TIME))["serialNumber"]
        for item in others
    ]
    assert len(set(serials)) == 3


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [at, *(path for key, child in children for path in paths_of(child, (*at, key)))]


@given(st.data())
def test_a_damaged_document_is_refused_or_says_something_else(kit: Kit, data: st.DataObject) -> None:
    document: Any = json.loads(written(kit, PATCHES[:2]))
    path = data.draw(st.sampled_from(paths_of(document)[1:]))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        del parent[path[-1]]
    else:
        parent[path[-1]] = data.draw(
            st.none() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({})
        )
    try:
        read_sbom(json.dumps(document).encode())
    except IntegrityError as error:
        assert "vllm-stack.cdx.json" in error.message  # noqa: PT017 - any other exception fails the test


@given(st.binary(max_size=40))
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="is damaged"):
        read_sbom(data)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(IntegrityError, match="is damaged"):
        read_sbom(b"[" * 100_000)
