"""The npm package and the Go module as their users get them, without publishing them."""

import asyncio
import json
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.release.test_versions import REPOSITORY
from tests.release.workflows import ROOT, shell
from tests.support.fresh_environments import run
from tests.support.toolchains import require

MODULE: Final = f"{REPOSITORY.removeprefix('https://')}/clients/go"
USER: Final = f"""package main

import (
	"fmt"

	bough "{MODULE}"
)

func main() {{ fmt.Println(bough.Version) }}
"""

pytestmark = [pytest.mark.timeout(600), pytest.mark.wheel]


async def test_the_npm_package_is_what_its_user_imports_and_nothing_more(tmp_path: Path) -> None:
    require("typescript")
    ignored = shutil.ignore_patterns("node_modules", "dist", "*.tgz")
    client = shutil.copytree(ROOT / "clients/typescript", tmp_path / "clients" / "typescript", ignore=ignored)
    code, out = await run(*shell("release.yml", "Build the npm package"), folder=client)
    assert code == 0, out
    (package,) = (tmp_path / "out" / "npm").glob("*.tgz")
    check_npm(package)

    user = tmp_path / "user"
    user.mkdir()
    installed = await run("npm", "install", "--no-audit", "--no-fund", "--prefer-offline", str(package), folder=user)
    program = "import * as b from '@bough-dev/bough'; import * as v1 from '@bough-dev/bough/v1'; "
    program += "import * as t from '@bough-dev/bough/testing'; "
    program += "console.log([b, v1, t].every((each) => Object.keys(each).length > 0))"
    imported = await run("node", "--input-type=module", "--eval", program, folder=user)

    assert installed[0] == 0, installed[1]
    assert imported == (0, "true\n")


def check_npm(package: Path) -> None:
    """It has what was built, a page for the registry and the license, and no sources of tests."""
    with tarfile.open(package) as archive:
        names = {name.removeprefix("package/") for name in archive.getnames()}
    loose = {name for name in names if "/" not in name}
    assert loose == {"package.json", "README.md", "LICENSE"}
    assert {"dist/index.js", "dist/index.d.ts", "dist/bough/v1/index.js", "dist/bough/v1/index.d.ts"} <= names
    assert [name for name in names if not name.startswith("dist/") and name not in loose] == []
    assert [name for name in names if "test/" in name or "driver/" in name or "examples/" in name] == []


def published(folder: Path) -> str:
    """Write the Go module of the working tree into a folder that `go` reads as a proxy; return its version."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "clients/go"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.splitlines()
    versions = folder / MODULE / "@v"
    versions.mkdir(parents=True)
    version = f"v{tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']['version']}"
    (versions / "list").write_text(f"{version}\n", encoding="utf-8")
    (versions / f"{version}.info").write_text(json.dumps({"Version": version}), encoding="utf-8")
    shutil.copy(ROOT / "clients" / "go" / "go.mod", versions / f"{version}.mod")
    with zipfile.ZipFile(versions / f"{version}.zip", "w") as archive:
        # What is in a module of another name below it is not the module's.
        others = [
            path.removesuffix("go.mod") for path in names if path.endswith("/go.mod") and path != "clients/go/go.mod"
        ]
        for name in (name for name in names if not name.startswith(tuple(others))):
            archive.write(ROOT / name, f"{MODULE}@{version}/{name.removeprefix('clients/go/')}")
    return version


async def test_the_go_module_is_got_by_its_tag(tmp_path: Path) -> None:
    require("go")
    version = await asyncio.to_thread(published, tmp_path / "proxy")
    user = tmp_path / "user"
    user.mkdir()
    (user / "main.go").write_text(USER, encoding="utf-8")
    _, known = await run("go", "env", "GOPROXY", "GOMODCACHE", folder=user)
    proxies, cache = known.split()
    variables = {
        # What others published is taken from where it was downloaded before, and else from where it always comes from.
        "GOPROXY": f"file://{tmp_path}/proxy,file://{cache}/cache/download,{proxies}",
        "GONOSUMDB": MODULE,
        "GOFLAGS": "-modcacherw",
        # A version is never downloaded twice: this one must not stay on the machine.
        "GOMODCACHE": f"{tmp_path}/modules",
    }
    made = await run("go", "mod", "init", "example.com/user", folder=user, variables=variables)
    got = await run("go", "get", f"{MODULE}@latest", folder=user, variables=variables)
    ran = await run("go", "run", ".", folder=user, variables=variables)

    assert (made[0], got[0]) == (0, 0), made[1] + got[1]
    assert ran == (0, f"{version.removeprefix('v')}\n")
