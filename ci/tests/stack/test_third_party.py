"""What the real releases pin of others is read without remainder, and told where it changed."""

from __future__ import annotations

import pytest

from realstacks import release_base
from vllm_stack.thirdparty import ThirdPartyChange, compare_third_party, third_party_pins

CUDA, CMAKE = "requirements/cuda.txt", "cmake/external_projects"
DEEPGEMM = ("1e1842a833699298f7afc02eefb2ed168fff6938", "0820030756945b2daec208e8e8255268360f337d")
FLASHMLA = ("0eee43b12f034b657133cf2afca6a72ebb6efccf", "e2afa5fd8c220fbd05fe03fc24c9d5e64c24641b")


@pytest.mark.parametrize("release", ["0.31.0", "0.32.0", "0.33.0"])
def test_all_files_of_a_release_can_be_read(release: str) -> None:
    base = release_base(release)
    pins, unread = third_party_pins(base.git, base.commit)
    assert unread == []
    names = {name for _, name, _ in pins}
    assert {"cutlass", "deepgemm", "flashmla", "vllm-flash-attn", "triton_kernels", "qutlass"} <= names
    assert {"torch", "flashinfer-python", "transformers", "NCCL_VERSION", "CUDA_VERSION", "rust"} <= names
    # Whatever is fetched from a repository is pinned.
    fetched = {
        name: value for (kind, name, file), value in pins.items() if kind == "build" and "cmake" in file
    }
    assert {
        name.removesuffix(" repository") for name in fetched if name.endswith(" repository")
    } <= fetched.keys()
    assert all(value != "as it stands" for value in pins.values())


def test_what_0_33_0_pins_otherwise() -> None:
    report = compare_third_party(release_base("0.32.0"), release_base("0.33.0"))
    assert report.unread == ()
    for change in (
        ThirdPartyChange("build", "deepgemm", *DEEPGEMM, f"{CMAKE}/deepgemm.cmake"),
        ThirdPartyChange("build", "flashmla", *FLASHMLA, f"{CMAKE}/flashmla.cmake"),
        ThirdPartyChange("build", "TORCH_SUPPORTED_VERSION_CUDA", "2.13.0", "2.14.0", "CMakeLists.txt"),
        ThirdPartyChange("python", "torch", "==2.13.0", "==2.14.0", CUDA),
        ThirdPartyChange("python", "torch", "==2.13.0", "==2.14.0", "pyproject.toml"),
        ThirdPartyChange("python", "flashinfer-python", "==0.7.0.post1", "==0.7.2.post1", CUDA),
        ThirdPartyChange("python", "certifi", None, ">=2026.10.19", "requirements/common.txt"),
        ThirdPartyChange("docker", "NCCL_VERSION", "2.30.7", "2.31.2", "docker/Dockerfile"),
    ):
        assert change in report.changes
    unchanged = {"cutlass", "qutlass", "triton_kernels", "numba", "tilelang", "CUDA_VERSION"}
    assert unchanged.isdisjoint(change.name for change in report.changes)
