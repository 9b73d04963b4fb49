"""What is published: the wheel and the source archive hold the package, whole, and install."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchrl_vllm_sync"
ADDRESS = "https://files.example/v1"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both archives, as they are released."""
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, ROOT / "tools" / "dist.py", ADDRESS, target],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,), (archive,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, archive


def package_files():
    """Everything of the package that users need; caches are no part of it."""
    found = (one for one in PACKAGE.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
    return {one.relative_to(ROOT).as_posix() for one in found}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        described = next(one for one in names if one.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(described))
    assert package_files() <= names
    assert "torchrl_vllm_sync/py.typed" in names
    assert {one.split("/")[0] for one in names} == {
        "torchrl_vllm_sync",
        f"torchrl_vllm_sync-{PROJECT['version']}.dist-info",
    }
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert any(one.startswith(f"{ADDRESS}/benchmarks/results/") for one in links)
    assert all(one.startswith(("https://", "http://", "#")) for one in links)


@pytest.mark.slow
def test_the_source_archive_holds_what_a_build_needs(built):
    with tarfile.open(built[1]) as archive:
        names = {one.partition("/")[2] for one in archive.getnames()}
    assert package_files() | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_installed_wheel_is_imported_without_warnings(built, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", tmp_path, built[0]], check=True, timeout=60)
    code = "import torchrl_vllm_sync as p; print(p.__file__); [getattr(p, n) for n in p.__all__]"
    found = subprocess.run(
        [sys.executable, "-I", "-W", "error:::torchrl_vllm_sync", "-c",
         f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert found.stdout.strip() == str(tmp_path / "torchrl_vllm_sync" / "__init__.py")
