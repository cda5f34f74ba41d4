"""The texts by which a patched wheel says that it is not an official one, and what was changed in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

    from vllm_stack.patch import Patch
    from vllm_stack.pins import Pin


def changes_text(
    changed: tuple[str, ...], added: tuple[str, ...], removed: tuple[str, ...], version_file: str | None
) -> str:
    """Return the list of changed, added and removed files, as indented lines under headings."""
    parts = (
        ("Files changed in this wheel:", changed),
        ("File changed to state the version:", (version_file,) if version_file else ()),
        ("Files added to this wheel:", added),
        ("Files removed from this wheel:", removed),
    )
    texts = [f"{title}\n\n" + "".join(f"    {path}\n" for path in paths) for title, paths in parts if paths]
    return "\n".join(texts)


def metadata_notice(pin: Pin, version: Version, patches: tuple[Patch, ...], changes: str) -> str:
    """Return what stands before upstream's description in METADATA, as Markdown and readable as text."""
    lines = [
        f"**This is not an official release of {pin.distribution}.** It is {pin.distribution} {pin.release} "
        f"changed by the vLLM Blackwell stack, version {version}.",
        "Do not report its faults to the upstream project before you have seen them in an official release.",
        "",
        "Patches in this wheel:",
        "",
        *(f"- {patch.name}: {patch.subject.removeprefix('[PATCH] ')}" for patch in patches),
    ]
    return "\n".join(lines) + f"\n\n{changes}\nThe description of the official release follows.\n"
