"""The wheel's bill of materials: what it was made of, as CycloneDX JSON in ``dist-info/sboms`` (PEP 770).

``pedigree.ancestors`` names the official wheel with its hash, ``pedigree.patches`` carries the patches
themselves. The order of patches is a fact that CycloneDX has no place for; it is in the properties, like the
stack id and the hashes by which :mod:`vllm_stack.verify` checks a wheel.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cyclonedx.model import AttachedText, HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from vllm_stack.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_stack.patch import Patch as StackPatch
    from vllm_stack.pins import Pin, PinnedWheel

FILE_NAME = "vllm-stack.cdx.json"
_PREFIX = "vllm-stack:"
#: Namespace of our serial numbers, which have to be UUIDs: drawn once.
_NAMESPACE = uuid.UUID("5c1f4a0e-7d0b-4e0b-9a58-1f7f5a3f8f5e")


@dataclass(frozen=True)
class Materials:
    """What a patched wheel was made of."""

    target: str
    distribution: str
    version: str
    stack_id: str
    official_file: str
    official_sha256: str
    patches: tuple[tuple[str, str], ...]
    """(name, sha256) of each patch, in order."""
    files: Mapping[str, str]
    """sha256 of each changed or added file, by path."""
    removed: tuple[str, ...]


def write_sbom(
    materials: Materials, pin: Pin, wheel: PinnedWheel, patches: tuple[StackPatch, ...], dos_time: int
) -> bytes:
    """Return the CycloneDX document for ``materials``; equal input gives equal bytes.

    ``dos_time`` is the date of the official wheel's METADATA in the zip format's form. It stands as the
    document's time, because the moment of the build must not change the wheel.
    """
    root = _component(materials, pin, wheel, patches)
    bom = Bom(
        serial_number=uuid.uuid5(_NAMESPACE, f"{materials.version} {wheel.sha256} {materials.stack_id}")
    )
    bom.metadata.component = root
    bom.metadata.timestamp = _moment(dos_time)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _moment(dos_time: int) -> datetime:
    date, time = dos_time >> 16, dos_time & 0xFFFF
    year, month, day = (date >> 9) + 1980, date >> 5 & 0xF, date & 0x1F
    return datetime(year, month, day, time >> 11, time >> 5 & 0x3F, time % 32 * 2, tzinfo=UTC)


def _sha256(value: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=value)]


def _file_component(path: str, sha256: str) -> Component:
    return Component(type=ComponentType.FILE, name=path, hashes=_sha256(sha256), bom_ref=f"file:{path}")


def _component(
    materials: Materials, pin: Pin, wheel: PinnedWheel, patches: tuple[StackPatch, ...]
) -> Component:
    official = Component(
        name=pin.distribution,
        version=pin.release,
        type=ComponentType.LIBRARY,
        bom_ref="official-wheel",
        purl=PackageURL("pypi", None, pin.distribution, pin.release, {"file_name": wheel.filename}),
        hashes=_sha256(wheel.sha256),
    )
    texts = [AttachedText(content=patch.data.decode("utf-8", "replace")) for patch in patches]
    changes = [Patch(type=PatchClassification.UNOFFICIAL, diff=Diff(text=text)) for text in texts]
    return Component(
        name=materials.distribution,
        version=materials.version,
        type=ComponentType.LIBRARY,
        bom_ref="patched-wheel",
        purl=PackageURL("pypi", None, materials.distribution, materials.version),
        components=[_file_component(path, sha256) for path, sha256 in materials.files.items()],
        pedigree=Pedigree(ancestors=[official], patches=changes),
        properties=[
            Property(name=_PREFIX + key, value=value) for key, value in _properties(materials).items()
        ],
    )


def _properties(materials: Materials) -> dict[str, str]:
    return {
        "target": materials.target,
        "stack-id": materials.stack_id,
        "official-file": materials.official_file,
        **{f"patch:{at:04}": f"{sha} {name}" for at, (name, sha) in enumerate(materials.patches, start=1)},
        **{f"removed:{at:04}": path for at, path in enumerate(materials.removed, start=1)},
    }


def read_sbom(data: bytes) -> Materials:
    """Return what a wheel's SBOM says it was made of. IntegrityError when it is not one of ours."""
    try:
        document = json.loads(data)
        return _materials(document)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{FILE_NAME} is damaged: {type(error).__name__} {error}") from error


def _only_hash(component: dict[str, Any]) -> str:
    (entry,) = component["hashes"]
    if entry["alg"] != "SHA-256":
        raise ValueError(f"{component['name']} has a hash by {entry['alg']}")
    return str(entry["content"])


def _materials(document: dict[str, Any]) -> Materials:
    root = document["metadata"]["component"]
    (official,) = root["pedigree"]["ancestors"]
    properties = {item["name"].removeprefix(_PREFIX): item["value"] for item in root["properties"]}
    numbered = sorted(item for item in properties.items() if ":" in item[0])
    patches = [value.split(" ", 1) for key, value in numbered if key.startswith("patch:")]
    return Materials(
        target=properties["target"],
        distribution=root["name"],
        version=root["version"],
        stack_id=properties["stack-id"],
        official_file=properties["official-file"],
        official_sha256=_only_hash(official),
        patches=tuple((name, sha256) for sha256, name in patches),
        files={item["name"]: _only_hash(item) for item in root["components"]},
        removed=tuple(value for key, value in numbered if key.startswith("removed:")),
    )
