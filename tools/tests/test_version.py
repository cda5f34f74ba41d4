"""Versions of wheels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from vllm_stack.errors import UsageError
from vllm_stack.series import Release
from vllm_stack.version import check_label, is_ours, release_number, wheel_version

ONE, TWO, THREE = "1a" * 32, "2b" * 32, "3c" * 32
RELEASES = (
    Release(upstream="0.33.0", number=1, stack_id=ONE),
    Release(upstream="0.33.0", number=2, stack_id=TWO),
    Release(upstream="0.32.0", number=7, stack_id=THREE),
)


def test_a_released_stack_has_its_number() -> None:
    assert str(wheel_version(ONE, "0.33.0", RELEASES)) == "0.33.0+bw.1"
    assert str(wheel_version(TWO, "0.33.0", RELEASES)) == "0.33.0+bw.2"
    assert release_number(TWO, "0.33.0", RELEASES) == 2


def test_another_stack_has_the_last_number_and_its_id() -> None:
    assert str(wheel_version(THREE, "0.33.0", RELEASES)) == "0.33.0+bw.2.s3c3c3c3c"
    assert str(wheel_version(THREE, "0.33.0", ())) == "0.33.0+bw.0.s3c3c3c3c"
    assert release_number(THREE, "0.33.0", RELEASES) is None


def test_numbers_of_other_upstream_releases_do_not_count() -> None:
    assert str(wheel_version(THREE, "0.32.0", RELEASES)) == "0.32.0+bw.7"
    assert str(wheel_version(ONE, "0.34.0", RELEASES)) == "0.34.0+bw.0.s1a1a1a1a"


def test_the_order_of_releases_does_not_matter() -> None:
    assert wheel_version(THREE, "0.33.0", RELEASES[::-1]) == wheel_version(THREE, "0.33.0", RELEASES)


def test_an_id_of_digits_alone_stays_text() -> None:
    # Without the letter, PEP 440 would read the part as a number and drop its zeros.
    version = wheel_version("00000012" + "0" * 56, "0.33.0", ())
    assert str(version) == "0.33.0+bw.0.s00000012"


def test_upstreams_requirements_accept_the_version() -> None:
    version = wheel_version(ONE, "0.33.0", RELEASES)
    assert version in SpecifierSet("==0.33.0")
    assert version in SpecifierSet(">=0.33.0")
    assert version > Version("0.33.0")
    assert version < Version("0.33.1")
    assert wheel_version(TWO, "0.33.0", RELEASES) > version


@pytest.mark.parametrize("label", ["cpu", "CPU", "cPu", "mycpu1", "a.cpu", "x-CPU-y", "a_cPuB"])
def test_a_label_with_cpu_is_refused(label: str) -> None:
    with pytest.raises(UsageError, match="CPU build"):
        check_label(label)
    with pytest.raises(UsageError, match="CPU build"):
        wheel_version(ONE, "0.33.0", RELEASES, label)


# The long s and the Kelvin sign match [a-z] where case is ignored.
BAD_LABELS = [
    "",
    " ",
    "a b",
    "a+b",
    "+",
    "a..b",
    ".a",
    "a.",
    "ä",
    "\u017f",
    "\u212a",
    "a\n",
    "\na",
    "a/b",
    "1!2",
    "a*",
]


@pytest.mark.parametrize("label", BAD_LABELS)
def test_what_is_no_local_version_is_refused(label: str) -> None:
    with pytest.raises(UsageError, match="PEP 440"):
        check_label(label)


@pytest.mark.parametrize("label", ["scdcdcdcd", "SCDCDCDCD", "s00000012.acme", "s3c3c3c3c-1"])
def test_a_label_like_the_id_of_a_stack_is_refused(label: str) -> None:
    with pytest.raises(UsageError, match="two stacks could share a version"):
        wheel_version(TWO, "0.33.0", RELEASES, label)


@pytest.mark.parametrize("label", ["scdcdcdc", "scdcdcdcde", "acme.scdcdcdcd", "sxdcdcdcd"])
def test_a_label_that_only_resembles_an_id_is_taken(label: str) -> None:
    assert str(wheel_version(TWO, "0.33.0", RELEASES, label)) == f"0.33.0+bw.2.{label}"


def test_no_label_gives_a_release_the_version_of_another_stack() -> None:
    other = wheel_version("cd" * 32, "0.33.0", RELEASES)
    with pytest.raises(UsageError):
        wheel_version(TWO, "0.33.0", RELEASES, str(other.local).removeprefix("bw.2."))


def test_a_label_is_an_addition_in_normal_form() -> None:
    assert str(wheel_version(ONE, "0.33.0", RELEASES, "ACME_007")) == "0.33.0+bw.1.acme.7"
    assert str(wheel_version(THREE, "0.33.0", RELEASES, "acme")) == "0.33.0+bw.2.s3c3c3c3c.acme"


@given(st.text(max_size=12) | st.from_regex(r"\A[a-zA-Z0-9]+([._-][a-zA-Z0-9]+)*\Z"))
def test_any_label_is_refused_or_gives_a_version_of_a_wheel(label: str) -> None:
    try:
        version = wheel_version(THREE, "0.33.0", RELEASES, label)
    except UsageError:
        return
    assert str(version).startswith("0.33.0+bw.2.s3c3c3c3c.")
    assert "cpu" not in str(version)
    assert str(Version(str(version))) == str(version)
    assert parse_wheel_filename(f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl")[1] == version


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_two_stacks_do_not_share_a_version(one: bytes, two: bytes) -> None:
    versions = {wheel_version(item.hex(), "0.33.0", RELEASES) for item in (one, two)}
    assert len(versions) == len({one[:4], two[:4]})


@pytest.mark.parametrize(
    ("version", "ours"), [("1.0+bw.1", True), ("1.0+bw", True), ("1.0", False), ("1.0+bwx.1", False)]
)
def test_versions_of_this_project_are_known(*, version: str, ours: bool) -> None:
    assert is_ours(Version(version)) is ours
