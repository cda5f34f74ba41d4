"""What ``verify`` can find: each kind has a code that stays the same from release to release."""

from __future__ import annotations

from dataclasses import dataclass

CODES: dict[str, str] = {
    "damaged": "a file or the archive cannot be read as what it is",
    "direct-url": "a wheel says where it was installed from",
    "file-name": "the name of the file is not one of this distribution's wheels",
    "import-elsewhere": "another folder is imported instead of the installation",
    "installed-twice": "there is a second installation on the search path",
    "license-missing": "a licence file that METADATA names is not there",
    "name": "METADATA is that of another distribution",
    "native-tag": "a native file is not for the interpreter, ABI or processor of the tag",
    "not-installed": "the interpreter has no such distribution",
    "record-absent": "there is no RECORD",
    "record-mismatch": "a file has another hash or size than RECORD says",
    "record-missing": "a file that RECORD lists is not there",
    "record-no-hash": "RECORD lists a file without its hash",
    "record-unlisted": "a file is there that RECORD does not list",
    "report-invalid": "the report beside the wheel cannot be read",
    "report-mismatch": "the report beside the wheel describes another file",
    "sbom-file": "a patched file is not the one that the SBOM names",
    "sbom-missing": "the version is one of ours, but there is no SBOM",
    "sbom-removed": "a file is there that the SBOM says was removed",
    "sbom-version": "the SBOM was made for another version",
    "source-file": "a file that the stack leaves alone is not what upstream's sources have",
    "stack-id": "it was made of another stack than the one at hand",
    "stack-member": "a patched file is not what the stack at hand gives",
    "stack-official": "it was made of an official wheel that is not pinned",
    "stack-patches": "the SBOM lists other patches than the stack at hand",
    "stack-version": "the version is not the one that the stack at hand gives",
    "tags": "WHEEL and the file name state different tags",
    "unpatched": "the version is not one of this project's: the official one, without the stack",
    "version-dist-info": "the dist-info or data folder is named after another version",
    "version-file-name": "the file name states another version than METADATA",
    "version-metadata": "METADATA states no valid version",
    "version-module": "the package's version module states another version than METADATA",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    code: str
    """A key of CODES."""
    subject: str
    """The file it is about, or the wheel or installation."""
    message: str
