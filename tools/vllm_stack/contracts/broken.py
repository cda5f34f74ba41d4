"""Broken contracts, and their explanation: what upstream did, and where the thing went."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from vllm_stack.contracts.change import Releases
from vllm_stack.contracts.tree import list_blobs
from vllm_stack.report import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_stack.contracts.observation import Site
    from vllm_stack.gitsource import History, UpstreamCommit
    from vllm_stack.patch import Patch
    from vllm_stack.replay import PatchPlace

Origin = Literal["derived", "series"]
#: Places of a definition that a message names at most.
_PLACES = 3


@dataclass(frozen=True)
class ContractFinding:
    """A contract that the new release breaks."""

    contract: str
    """What the patch relies on, in a fixed form."""
    origin: Origin
    path: str
    """File of the patch that relies on it; the series file for a written contract."""
    line: int | None
    """Line in the file as the patch leaves it on its own release."""
    expected: str
    found: str
    why: str | None = None
    read_at: str | None = None
    """Where the patched new release itself shows what is wrong, as path:line; of names alone."""
    consequences: tuple[str, ...] = ()
    """Further contracts that hang on this one and could not be looked at."""
    definition: str | None = None
    """Where the old release defines it, as path:line."""
    upstream_change: tuple[str, ...] = ()
    """Lines of the unified diff between the releases at the definition."""
    commits: tuple[UpstreamCommit, ...] = ()
    """Upstream's commits that touched the definition, where a history is at hand."""


@dataclass(frozen=True)
class BrokenContract:
    """A finding that is still to be explained, with what that needs."""

    finding: ContractFinding
    old_sites: tuple[Site, ...] = ()
    """Where the old release has it; of several the first that upstream changed counts."""
    new_site: Site | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What to look for elsewhere, each with the file that defined it."""
    module: str | None = None
    """Where the old release has the module that it is about."""

    @property
    def homes(self) -> tuple[str, ...]:
        """The files of the old release that have what it is about."""
        paths = (*(site.path for site in self.old_sites), *self.names.values(), self.module)
        return tuple(dict.fromkeys(path for path in paths if path))


def name_missing(one: BrokenContract, missing: Sequence[Patch]) -> BrokenContract:
    """Say which of the stack's earlier patches, ``missing`` from the tree, change what a finding is about.

    Then upstream may not have broken anything: what the patch relies on comes with a patch of the same stack.
    """
    found, names = one.finding.found, dict(one.names)
    for path in one.homes:
        made = [patch for patch in missing if path in patch.paths]
        if made:
            listed = some([patch.name for patch in made], _PLACES)
            are = "which are not there" if len(made) > 1 else "which is not there"
            found += f"; {path} is changed by {listed}, {are}"
        if any(file.path == path and file.status == "A" for patch in made for file in patch.files):
            names = {name: home for name, home in names.items() if home != path}  # upstream never had them
    return replace(one, finding=replace(one.finding, found=found), names=names)


def explain_contracts(
    place: PatchPlace, broken: Sequence[BrokenContract], history: History | None = None
) -> tuple[ContractFinding, ...]:
    """Add to each finding where the thing went and what upstream did, with ``history`` by which commits."""
    if not broken:
        return ()
    with place.git.opened() as git:
        bases = [list_blobs(git, commit) for commit in (place.old_base, place.new_base)]
        made_for = list_blobs(git, place.old_after, place.old_base)
        explaining = _Explaining(Releases(git, place.new_base, *bases), made_for, history)
        return tuple(explaining.explained(one) for one in broken)


@dataclass(frozen=True)
class _Explaining:
    """Explains the broken contracts of one patch."""

    releases: Releases
    made_for: Mapping[str, str]
    """The files of the patch's own release, as it leaves them."""
    history: History | None

    def explained(self, one: BrokenContract) -> ContractFinding:
        """Return a finding with its explanation."""
        found = one.finding.found + "".join(self._whereabouts(one))
        return self._with_change(replace(one.finding, found=found), one)

    def _whereabouts(self, one: BrokenContract) -> Iterator[str]:
        """Say where the names are now that are gone from where they were."""
        for name, path in one.names.items():
            places = self.releases.places(name, path.partition("/")[0])
            if places:
                verb = "is still" if any(place.rpartition(":")[0] == path for place in places) else "is now"
                yield f"; {name} {verb} in {some(places, _PLACES)}"

    def _with_change(self, finding: ContractFinding, one: BrokenContract) -> ContractFinding:
        where = f"{one.old_sites[0].path}:{one.old_sites[0].line}" if one.old_sites else None
        on_old = (self.releases.on_old(site, self.made_for.get(site.path)) for site in one.old_sites)
        changes = [(old, self.releases.change(old)) for old in on_old if old is not None]
        old, change = next((found for found in changes if found[1]), changes[0] if changes else (None, ()))
        if not change and one.new_site is not None:
            change = self.releases.change(one.new_site, new=True)
        commits: tuple[UpstreamCommit, ...] = ()
        if self.history is not None and old is not None:
            commits = self.history.touching(old.path, range(old.line, old.end_line + 1))
        return replace(finding, definition=where, upstream_change=change, commits=commits)
