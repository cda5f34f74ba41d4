"""What the real patches rely on in the real pinned sources, and that a change of these is noticed."""

from __future__ import annotations

import ast
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from realstacks import ROOT, TARGETS
from vllm_stack.contracts import check_contracts, summary
from vllm_stack.contracts.boundnames import Version
from vllm_stack.contracts.linting import contracts_on_pin, places_on_pin
from vllm_stack.contracts.summary import parse
from vllm_stack.contracts.tree import SourceTree, list_blobs, module_name
from vllm_stack.merging import Side, sides, with_sides
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack
from vllm_stack.workbench import open_workbench
from vllm_stack.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_stack.base import Base
    from vllm_stack.git import Git
    from vllm_stack.replay import PatchPlace

BACKEND = "triton-mla-sparse-add-the-triton-mla-sparse-backend"
SPARSE = "vllm/model_executor/layers/attention/sparse_mla_attention.py"
#: A few that must be among the derived ones: if one is not, something is no longer looked at.
DERIVED = (
    "class vllm.model_executor.layers.attention.sparse_mla_attention.SparseMLACommonImpl has method "
    "_forward_mqa_kernel(self, q, kv_cache, topk_indices, valid_counts, *, layer, block_size, is_decode) "
    "to override",
    "class vllm.v1.attention.backend.AttentionImplBase declares supports_dcp, which TritonMLASparseImpl sets",
    "class vllm.config.attention.AttentionConfig has attribute hisparse_config",
    "vllm.v1.worker.workspace.WorkspaceManager.get_simultaneous accepts (*_)",
    "vllm.config.cache.CacheConfig accepts (block_size=_)",
    "vllm.v1.attention.backends.mla.triton_mla_sparse.TritonMLASparseImpl implements every abstract method "
    "of its bases",
)
#: File, what is replaced in it, and a part of the finding that this must give.
CHANGES = [
    (SPARSE, "_forward_mqa_kernel", "_run_mqa_kernel", "has a method _forward_mqa_kernel"),
    (
        SPARSE,
        "        is_decode: bool,\n",
        "        is_first: bool,\n",
        "keyword parameter is_first is passed",
    ),
    (SPARSE, "class SparseMLACommonImpl(", "class SparseMLABaseImpl(", "there is no SparseMLACommonImpl in"),
    (SPARSE, "    metadata_cls: type[T]\n", "", "declares metadata_cls"),
    (
        SPARSE,
        "supports_spec_as_decode: bool = False,",
        "as_decode: bool = False,",
        "'supports_spec_as_decode'",
    ),
    ("vllm/v1/attention/backend.py", "    supports_dcp: bool = False\n", "", "declares supports_dcp"),
    (
        "vllm/v1/attention/backend.py",
        "def max_decode_query_len(",
        "def longest_decode(",
        "no max_decode_query_len",
    ),
    ("vllm/config/attention.py", "hisparse_config:", "sparse_config:", "of it has hisparse_config"),
    ("vllm/v1/worker/workspace.py", "def get_simultaneous(", "def get_all(", "of it has get_simultaneous"),
    ("vllm/v1/attention/ops/metadata.py", None, None, "there is no such module"),
    (
        "vllm/models/deepseek_v32/attention.py",
        "self.impl.prepare_for_batch",
        "self.impl.prepare",
        "is not there in",
    ),
]

#: A patch that puts a function between the header of one of upstream's and its body.
SPLITTING = "indexer-fallback-decide-what-computes-the-logits"
DEEP_GEMM = "vllm/utils/deep_gemm.py"
#: The same as CHANGES, of names that this patch takes from upstream's function, or upstream's lines from its.
NAMES = [
    (
        [
            (
                '    max_seqlen_k: int,\n) -> torch.Tensor:\n    """',
                '    longest: int,\n) -> torch.Tensor:\n    """',
            ),
            ("        max_seqlen_k,\n    )\n", "        longest,\n    )\n"),
        ],
        [
            "nothing binds max_seqlen_k in fp8_fp4_mqa_logits(",
            "nothing binds longest in _deep_gemm_mqa_logits(",
        ],
    ),
    (
        [("        max_seqlen_k,\n    )\n", "        max_seqlen_k,\n        clean_logits,\n    )\n")],
        ["nothing binds clean_logits in _deep_gemm_mqa_logits("],
    ),
]
#: Where upstream's own code is looked at for names that seem to be unbound.
OWN_CODE = ("vllm/v1/attention/", "vllm/v1/worker/", "vllm/utils/")


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> tuple[Base, Stack]:
    """A real stack and the imported sources of its pin."""
    workspace = Workspace.locate(ROOT)
    stack = Stack.load(workspace, request.param)
    return base_of(workspace, stack.pin, offline=False), stack


@contextmanager
def writable_place(name: str) -> Iterator[PatchPlace]:
    """Give one patch of the stack, in a repository that can be written to."""
    workspace = Workspace.locate(ROOT)
    stack = Stack.load(workspace, "vllm")
    base = base_of(workspace, stack.pin, offline=False)
    with open_workbench(base) as git:
        found = [place for place in places_on_pin(base, stack) if name[:40] in place.patch.name]
        yield replace(found[0], git=git)


@pytest.fixture(scope="module")
def backend() -> Iterator[PatchPlace]:
    """The patch that adds the backend."""
    with writable_place(BACKEND) as place:
        yield place


@pytest.fixture(scope="module")
def splitting() -> Iterator[PatchPlace]:
    """The patch that splits functions of upstream."""
    with writable_place(SPLITTING) as place:
        yield place


def test_the_own_release_breaks_nothing(target: tuple[Base, Stack]) -> None:
    places = list(places_on_pin(*target))
    assert len(places) == len(target[1].patches)
    assert [check_contracts(place) for place in places] == [()] * len(places)


def test_every_patch_has_contracts_and_those_that_are_written_are_true(target: tuple[Base, Stack]) -> None:
    patches = contracts_on_pin(*target)
    assert [patch.false for patch in patches] == [()] * len(target[1].patches)
    assert all(patch.contracts for patch in patches)


def test_what_the_backend_relies_on_is_derived() -> None:
    workspace = Workspace.locate(ROOT)
    stack = Stack.load(workspace, "vllm")
    patches = contracts_on_pin(base_of(workspace, stack.pin, offline=False), stack)
    listed = {contract.contract for patch in patches for contract in patch.contracts}
    assert [contract for contract in DERIVED if contract not in listed] == []


def changed(git: Git, commit: str, edits: Mapping[str, tuple[str, str] | None]) -> str:
    """Return ``commit`` with text replaced in some files, or (None) without the file."""
    new: dict[str, Side | None] = {}
    for path, edit in edits.items():
        if edit is None:
            new[path] = None
            continue
        text = git.blob(commit, path).decode()
        assert edit[0] in text
        data = text.replace(*edit).encode()
        mode = sides(git, commit, [path])[path].mode
        new[path] = Side(mode, git.run("hash-object", "-w", "--stdin", stdin=data).text)
    return git.run("commit-tree", with_sides(git, git.tree(commit), new), "-m", "changed").text


@pytest.mark.parametrize(("path", "old", "new", "expected"), CHANGES)
def test_a_change_of_upstream_is_noticed(
    backend: PatchPlace, path: str, old: str | None, new: str | None, expected: str
) -> None:
    edits = {path: None if old is None or new is None else (old, new)}
    base, before, after = (
        changed(backend.git, commit, edits)
        for commit in (backend.new_base, backend.new_before, backend.old_after)
    )
    findings = check_contracts(replace(backend, new_base=base, new_before=before, new_after=after))
    assert [finding for finding in findings if expected in finding.found]
    shown = [line for finding in findings for line in finding.upstream_change]
    assert any(line.startswith("-") and (old or "").split("\n")[0] in line for line in shown)


@pytest.mark.parametrize(("edits", "expected"), NAMES)
def test_a_name_that_a_function_loses_is_noticed(
    splitting: PatchPlace, edits: list[tuple[str, str]], expected: list[str]
) -> None:
    commits: tuple[str, ...] = (splitting.new_base, splitting.new_before, splitting.old_after)
    for edit in edits:
        commits = tuple(changed(splitting.git, commit, {DEEP_GEMM: edit}) for commit in commits)
    base, before, after = commits
    findings = check_contracts(replace(splitting, new_base=base, new_before=before, new_after=after))
    assert len(findings) == len(expected)
    assert all(text in one.found for one, text in zip(findings, expected, strict=True))
    assert all(any("+" == line[:1] != line[1:2] for line in one.upstream_change) for one in findings)


def test_no_name_of_upstreams_own_code_is_called_unbound(target: tuple[Base, Stack]) -> None:
    """Every function taken as if a patch had changed it: all that is reported would be a false alarm."""
    base, _ = target
    lost, reads = [], 0
    with base.git.opened() as git:
        tree = SourceTree(list_blobs(git, base.commit), git.data)
        paths = [path for path in tree.blobs if path.startswith((*OWN_CODE, "vllm_gguf_plugin/"))]
        for path, name in ((path, module_name(path)) for path in paths):
            module = None if name is None else tree.module(name)
            text = tree.text(path) or b""
            node = None if module is None else parse(text)
            if module is not None and node is not None and module.path == path:
                version = Version(path, text, module, node)
                reads += len(version.reads)
                lost += [f"{path}:{found.line} {found.name}" for found in version.lost().values()]
    assert lost == []
    assert reads > 5000


def test_no_file_is_parsed_again_and_again(
    target: tuple[Base, Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What checking a stack costs is the files it reads: few of the tree, and hardly one of them twice."""
    base, _ = target
    places = list(places_on_pin(*target))
    texts: Counter[bytes] = Counter()

    def counted(text: bytes) -> ast.Module:
        texts[text] += 1
        return ast.parse(text)

    monkeypatch.setattr(summary, "ast", SimpleNamespace(**vars(ast) | {"parse": counted}))
    summary.parse.cache_clear()
    for place in places:
        check_contracts(place)
    with base.git.opened() as git:
        modules = [path for path in list_blobs(git, base.commit) if path.endswith(".py")]
    assert len(places) < len(texts) < len(modules) + sum(len(place.patch.paths) for place in places)
    assert texts.total() < 2 * len(texts)
    assert target[1].target != "vllm" or len(texts) < len(modules) / 10
