"""Checking what a patch relies on: what it finds on its own release must be there on the new one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from vllm_stack.contracts.boundnames import Version, added_numbers, lost_names, taken_names
from vllm_stack.contracts.broken import BrokenContract, ContractFinding, explain_contracts
from vllm_stack.contracts.change import Releases
from vllm_stack.contracts.infer import Inference
from vllm_stack.contracts.observation import Observation, Site, Status, breaks
from vllm_stack.contracts.observing import Observer
from vllm_stack.contracts.resolve import Cause, Resolver
from vllm_stack.contracts.summary import parse
from vllm_stack.contracts.tree import SourceTree, list_blobs, module_name
from vllm_stack.contracts.usage import Walker
from vllm_stack.contracts.written import Written, check_written
from vllm_stack.moved import renames
from vllm_stack.patch import Patch

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from vllm_stack.contracts.boundnames import LostName
    from vllm_stack.contracts.broken import Origin
    from vllm_stack.contracts.kinds import Contract
    from vllm_stack.git import Git
    from vllm_stack.gitsource import History
    from vllm_stack.patch import FileDiff
    from vllm_stack.replay import PatchPlace

#: Where written contracts stand.
SERIES = "series.toml"


@dataclass(frozen=True)
class ListedContract:
    """A contract that holds on the patch's own release."""

    contract: str
    origin: Origin
    path: str
    line: int | None
    expected: str
    why: str | None = None


def check_contracts(place: PatchPlace, history: History | None = None) -> tuple[ContractFinding, ...]:
    """Return the contracts of a patch that the new release breaks, and say what upstream did to them.

    What the patch relies on is derived from its code on its own release, and looked up again in the tree
    that the patch gave on the new one. Where the patch did not apply, its new files are put on the tree
    before it. What cannot be told without running code is no contract.
    """
    return explain_contracts(place, broken_contracts(place), history)


def broken_contracts(place: PatchPlace) -> tuple[BrokenContract, ...]:
    """Return the same without an explanation, which takes longer and which nothing depends on."""
    with Comparison.open(place) as comparison:
        derived = comparison.derived()
        names = comparison.names({one.finding.contract for one in derived})
        return (*derived, *names, *comparison.written())


def list_contracts(place: PatchPlace) -> tuple[ListedContract, ...]:
    """Return everything that a patch relies on, as it stands on the patch's own release."""
    with Comparison.open(place) as comparison:
        return comparison.listed()


@dataclass(frozen=True)
class _Sides:
    """A tree before and after the patch."""

    before: SourceTree
    after: SourceTree


@dataclass(frozen=True)
class Comparison:
    """One patch on two releases."""

    git: Git
    patch: Patch
    contracts: tuple[Contract, ...]
    added: Mapping[str, Collection[int]]
    releases: Releases
    old: _Sides
    new: _Sides
    #: The old release with what of the patch is also in ``new.after``.
    partial: SourceTree
    files: Mapping[str, ast.Module] = field(repr=False)
    """The Python files of the patch, as it leaves them on the old release."""
    #: Names of modules that upstream renamed, with their new names.
    renamed: Mapping[str, str]
    #: The commits before and after the patch on the new release.
    commits: tuple[str, str | None]

    @classmethod
    @contextmanager
    def open(cls, place: PatchPlace) -> Iterator[Comparison]:
        """Read both releases; nothing is parsed yet."""
        with place.git.opened() as git:
            yield cls._read(replace(place, git=git))

    @classmethod
    def _read(cls, place: PatchPlace) -> Comparison:
        git, patch = place.git, place.patch
        base = list_blobs(git, place.old_base)
        before, after = (
            list_blobs(git, commit, place.old_base) for commit in (place.old_before, place.old_after)
        )
        new_base = list_blobs(git, place.new_base)
        new_before = list_blobs(git, place.new_before, place.new_base)
        new_after = (
            new_before if place.new_after is None else list_blobs(git, place.new_after, place.new_base)
        )
        created = {path: after[path] for path in patch.paths if path in after and path not in before}
        in_new = {path: blob for path, blob in created.items() if new_after.get(path) == new_before.get(path)}
        kept = {path: after[path] for path in patch.paths if path in after and path in created}
        kept |= {
            path: after[path]
            for path in patch.paths
            if path in after and new_after.get(path) != new_before.get(path)
        }
        read = git.data
        return cls(
            git,
            patch,
            place.entry.contracts,
            added_lines(patch),
            Releases(git, place.new_base, base, new_base),
            _Sides(SourceTree(before, read), SourceTree(after, read)),
            _Sides(SourceTree(new_before, read), SourceTree(new_after, read, in_new)),
            SourceTree(before, read, kept),
            dict(_parsed(patch, after, read)),
            _moved_modules(place, [path for path in patch.paths if path in base and path not in new_before]),
            (place.new_before, place.new_after),
        )

    # -- derived ---------------------------------------------------------------------------------------

    def _observe(
        self, tree: SourceTree, renamed: Mapping[str, str] | None = None
    ) -> dict[Hashable, tuple[str, Observation]]:
        observer = Observer(Inference(Resolver(tree)))
        found: dict[Hashable, tuple[str, Observation]] = {}
        for path, node in self.files.items():
            own = self.old.after.module(module_name(path) or "")
            if own is None or own.path != path:
                continue
            there = (renamed or {}).get(own.name, own.name)
            walker = Walker(own, self.added.get(path, ()), observer, there)
            walker.visit(node)
            for key, observation in walker.observations.items():
                found.setdefault(key, (path, observation))
        return found

    def _is_own(self, site: Site | None) -> bool:
        return site is not None and site.line in self.added.get(site.path, ())

    def _relied_on(self) -> dict[Hashable, tuple[str, Observation]]:
        """Return what holds on the old release and is not the patch's own."""
        observed = self._observe(self.old.after)
        relied = {
            key: found
            for key, found in observed.items()
            if found[1].status is Status.HOLDS and found[1].contract and not self._is_own(found[1].site)
        }
        if not self._is_partial:
            return relied
        there = self._observe(self.partial)
        return {
            key: found
            for key, found in relied.items()
            if key in there and there[key][1].status is Status.HOLDS and not breaks(found[1], there[key][1])
        }

    @property
    def _is_partial(self) -> bool:
        after = self.old.after
        return any(self.partial.blob(path) != after.blob(path) for path in self.patch.paths)

    def derived(self) -> list[BrokenContract]:
        """Compare everything that the patch's code relies on."""
        relied = self._relied_on()
        seen = self._observe(self.new.after, self.renamed)
        broken: dict[str, BrokenContract] = {}
        hanging: dict[Cause, list[tuple[str, Observation]]] = {}
        for key, (path, old) in relied.items():
            new = seen.get(key, (path, Observation(key, Status.UNKNOWN, old.line)))[1]
            found = breaks(old, new)
            if found is not None:
                broken.setdefault(old.contract, _derived(path, old, new, found))
            elif new.status is Status.BLOCKED and new.cause is not None:
                hanging.setdefault(self._on_old(new.cause), []).append((path, old))
        return self._with_consequences(broken, hanging)

    def _on_old(self, cause: Cause) -> Cause:
        """Name a module as it was called before upstream renamed it."""
        before = {new: old for old, new in self.renamed.items()}
        return Cause(before.get(cause.module, cause.module), cause.name)

    def _with_consequences(
        self, broken: dict[str, BrokenContract], hanging: dict[Cause, list[tuple[str, Observation]]]
    ) -> list[BrokenContract]:
        for cause, observations in hanging.items():
            contract = _contract_of(cause)
            if contract not in broken:
                broken[contract] = self._from_cause(cause, *observations[0])
            one = broken[contract]
            texts = dict.fromkeys(observation.contract for _, observation in observations)
            finding = replace(one.finding, consequences=(*one.finding.consequences, *texts))
            names = {key: where for _, observation in observations for key, where in _named(observation)}
            broken[contract] = replace(one, finding=finding, names={**one.names, **names})
        return list(broken.values())

    def _from_cause(self, cause: Cause, path: str, observation: Observation) -> BrokenContract:
        """Make a finding of something that is absent and that the patch does not name itself."""
        where = self.new.after.path_of(self.renamed.get(cause.module, cause.module)) or cause.module
        found = "there is no such module" if cause.name is None else f"there is no {cause.name} in {where}"
        expected = "the module" if cause.name is None else f"{cause.name} in {cause.module}"
        finding = ContractFinding(_contract_of(cause), "derived", path, observation.line, expected, found)
        home = self.old.after.path_of(cause.module)
        names = {cause.name: home} if cause.name and home else {}
        return BrokenContract(finding, names=names, module=home)

    # -- names of functions ----------------------------------------------------------------------------

    def _versions(self, others: Callable[[str], Iterable[bytes]] = lambda _: ()) -> Iterator[Version]:
        """Yield the files that the patch changes, as it leaves them on the old release."""
        for file in self.patch.files:
            node, own = self.files.get(file.path), self.old.after.module(module_name(file.path) or "")
            if node is None or own is None or own.path != file.path:
                continue
            if self.old.before.blob(file.path) is not None:
                text = self.old.after.text(file.path) or b""
                yield Version(file.path, text, own, node, file, others(own.name))

    def names(self, told: Collection[str]) -> Iterator[BrokenContract]:
        """Compare what names mean in the functions that the patch changes, but for contracts ``told``."""
        changes: Mapping[str, FileDiff] | None = None
        for old in self._versions(self._on_new):
            path = self._new_path(old.module.name)
            before, after = (tree.text(path or "") for tree in (self.new.before, self.new.after))
            if path is None or before is None or after is None or before == after:
                continue  # it is the patch's own, or the patch is not there
            if old.is_the_same(before, after):
                continue
            changes = self._changes() if changes is None else changes
            new = self._version(self.new.after, path, changes.get(path), [before, old.text])
            if new is not None:
                without = partial(self._version, self.new.before, path)
                found = (lost for lost in lost_names(old, without, new) if lost.of_module not in told)
                yield from (self._from_name(old.path, lost) for lost in found)

    def _new_path(self, module: str) -> str | None:
        return self.new.after.path_of(self.renamed.get(module, module))

    def _on_new(self, module: str) -> Iterator[bytes]:
        """Yield the file as the patch leaves it on the new release."""
        text = self.new.after.text(self._new_path(module) or "")
        if text is not None:
            yield text

    def _changes(self) -> Mapping[str, FileDiff]:
        """Return what the patch changes on the new release, by file."""
        before, after = self.commits
        words = ("diff-tree", "-p", "--no-renames", "--unified=3", before, after or before)
        return {file.path: file for file in Patch("result", self.git.run(*words).stdout).files}

    @staticmethod
    def _version(
        tree: SourceTree, path: str, change: FileDiff | None = None, others: Iterable[bytes] = ()
    ) -> Version | None:
        text, module = tree.text(path), tree.module(module_name(path) or "")
        node = None if text is None else parse(text)
        if text is None or module is None or node is None:
            return None
        return Version(path, text, module, node, change, others)

    def _from_name(self, path: str, lost: LostName) -> BrokenContract:
        at = f"{lost.place.path}:{lost.place.line}"
        finding = ContractFinding(
            lost.contract, "derived", path, lost.line, lost.expected, lost.found, read_at=at
        )
        place = self.releases.on_new(lost.place, self.new.after.blob(lost.place.path))
        return BrokenContract(finding, lost.sites, place)

    # -- written ---------------------------------------------------------------------------------------

    def written_on_old(self) -> tuple[Written, ...]:
        """Look up the contracts of the series file on the release that they were written for."""
        return tuple(self._written_in(contract)[0] for contract in self.contracts)

    def written(self) -> list[BrokenContract]:
        """Compare the contracts of the series file."""
        broken = []
        for contract in self.contracts:
            old, new = self._written_in(contract)
            if old.found is None and new.found is not None:
                finding = ContractFinding(
                    new.contract, "series", SERIES, None, new.expected, new.found, contract.why
                )
                names = {new.gone: old.site.path} if new.gone and old.site else {}
                broken.append(BrokenContract(finding, _sites(old.site), new.site, names))
        return broken

    def _written_in(self, contract: Contract) -> tuple[Written, Written]:
        before = contract.when == "before"
        old = self.old.before if before else (self.partial if self._is_partial else self.old.after)
        new = self.new.before if before else self.new.after
        return check_written(contract, Resolver(old)), check_written(contract, Resolver(new))

    # -- results ---------------------------------------------------------------------------------------

    def listed(self) -> tuple[ListedContract, ...]:
        """Return all contracts that hold on the old release, each once."""
        listed: dict[str, ListedContract] = {}
        for path, found in self._relied_on().values():
            listed.setdefault(
                found.contract, ListedContract(found.contract, "derived", path, found.line, found.expected)
            )
        for old in self._versions():
            for name in taken_names(old).values():
                one = ListedContract(name.contract, "derived", old.path, name.line, name.expected)
                listed.setdefault(name.contract, one)
        for contract in self.contracts:
            written = self._written_in(contract)[0]
            if written.found is None:
                listed[written.contract] = ListedContract(
                    written.contract, "series", SERIES, None, written.expected, contract.why
                )
        return tuple(listed.values())


def _parsed(
    patch: Patch, blobs: Mapping[str, str], read: Callable[[str], bytes]
) -> Iterator[tuple[str, ast.Module]]:
    for path in patch.paths:
        node = parse(read(blobs[path])) if path.endswith(".py") and path in blobs else None
        if node is not None:
            yield path, node


def _moved_modules(place: PatchPlace, gone: Collection[str]) -> dict[str, str]:
    """Return the modules among the files ``gone`` that upstream renamed between the releases."""
    if not any(file.path in gone and file.status == "M" for file in place.patch.files):
        return {}
    found = renames(place.git, place.old_base, place.new_base)
    pairs = ((module_name(path), module_name(found[path].path)) for path in gone if path in found)
    return {old: new for old, new in pairs if old and new}


def _derived(path: str, old: Observation, new: Observation, found: str) -> BrokenContract:
    finding = ContractFinding(old.contract, "derived", path, old.line, old.expected, found)
    gone = new.status is Status.ABSENT
    about = next((word for text in sorted(new.problems - old.problems) for word in text.split()[:1]), "")
    old_site, new_site = old.sites.get(about, old.site), new.sites.get(about, new.site)
    return BrokenContract(finding, _sites(old_site), new_site, dict(_named(old)) if gone else {})


def _sites(site: Site | None) -> tuple[Site, ...]:
    return () if site is None else (site,)


def _named(old: Observation) -> list[tuple[str, str]]:
    """Return the name that an observation is about, with the file that defines it."""
    return [(old.name, old.home.path)] if old.name and old.home else []


def _contract_of(cause: Cause) -> str:
    return f"module {cause.module} exists" if cause.name is None else f"{cause.module} defines {cause.name}"


def added_lines(patch: Patch) -> dict[str, frozenset[int]]:
    """Return for each file of a patch the numbers of the lines that it adds, in the file after it."""
    return {file.path: frozenset(added_numbers(file)) for file in patch.files}
