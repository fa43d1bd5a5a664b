"""What `bough doctor` reports of issuers, API keys and the table of certificates: each with its file and line."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web

from bough_server.cli.doctor import examine
from bough_server.cli.options import Target
from tests.support.issuer import issuing


def write_config(folder: Path, **auth: object) -> Path:
    """A configuration whose section `auth` has a setting a line from line 2 on, and an item a line in its lists."""
    lines = ["auth:"]
    for name, value in auth.items():
        items = value if isinstance(value, list) else []
        lines += [
            f"  {name}:{'' if items else f' {json.dumps(value)}'}",
            *(f"    - {json.dumps(each)}" for each in items),
        ]
    config = folder / "bough.yaml"
    config.write_text("\n".join([*lines, "tenants: {acme: {}}"]), encoding="utf-8")
    return config


def write_keys(folder: Path, *entries: dict[str, object]) -> None:
    """A file of keys with an entry a line, from line 2 on."""
    keys = [{"sha256": "5" * 64, "tenant": "acme", "user": "ci", **entry} for entry in entries]
    (folder / "keys.yaml").write_text(
        "\n".join(["keys:", *(f"  - {json.dumps(key)}" for key in keys)]), encoding="utf-8"
    )


async def examine_callers(config: Path) -> list[str]:
    """Return the findings about callers, or that about a configuration that is not valid."""
    findings = await examine(Target(config=config, embedded=True))
    names = ("issuer ", "API key", "certificates of callers")
    chosen = [each for each in findings if each.name.startswith(names)]
    return [
        f"{'ok' if each.is_right else '--' if each.is_optional else '!!'}  {each.name}: {each.words}"
        for each in chosen or findings[1:2]
    ]


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


async def _answer_without_keys(_: web.Request) -> web.StreamResponse:
    return web.json_response({"keys": []})


async def test_issuers_are_asked_for_their_keys(tmp_path: Path) -> None:
    async with issuing() as well, issuing() as away, issuing() as empty:
        away.behavior, empty.behavior = _refuse, _answer_without_keys
        sections = [
            well.section(),
            away.section(),
            empty.section(jwks_url=f"{empty.url}/keys", tenant="gamma", tenant_claim=None),
        ]
        config = write_config(tmp_path, oidc=sections)
        found = await examine_callers(config)
    unusable = "its keys cannot be used, and no token of it is accepted:"
    assert found == [
        f"--  issuer {well.url}: {config}:3: auth.oidc[0].issuer: first for RS256; it is reached by http, so that who "
        "reads along on this machine sees its keys: use https",
        f"!!  issuer {away.url}: {config}:4: auth.oidc[1].issuer: {unusable} {away.url}/keys answered with status 503. "
        "Correct the address, or the issuer.",
        f"!!  issuer {empty.url}: {config}:5: auth.oidc[2].jwks_url: {unusable} Its key set has no key that makes the "
        "signatures of auth.oidc. Correct the address, or the issuer.",
        f"!!  issuer {empty.url}: {config}:5: auth.oidc[2].tenant: `tenants` of bough.yaml does not have gamma, so "
        "that all its callers are refused: add it there",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"issuer": "http://login.acme.example"}, "issuer: must begin with https://; http:// is for this machine only"),
        (
            {"algorithms": ["HS256"]},
            "algorithms[0]: HS256 would let others than the issuer make tokens: name a signature by its private key, "
            "such as RS256",
        ),
    ],
)
async def test_an_issuer_whose_tokens_others_could_read_or_make_is_a_mistake_of_the_configuration(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    section = {"issuer": "https://login.acme.example", "audience": "bough", "tenant": "acme", **changes}
    config = write_config(tmp_path, oidc=[section])
    assert await examine_callers(config) == [f"!!  configuration: {config}:3: auth.oidc[0].{problem}"]


async def test_the_keys_of_the_file_are_judged(tmp_path: Path) -> None:
    config = write_config(tmp_path, keys_file="keys.yaml")
    path = tmp_path / "keys.yaml"
    absent = await examine_callers(config)
    soon = (datetime.now(UTC) + timedelta(days=3, hours=1)).replace(microsecond=0)
    write_keys(
        tmp_path,
        {"id": "ever"},
        {"id": "later", "expires": "2100-01-01T00:00:00Z"},
        {"id": "old", "expires": "2020-01-01T00:00:00Z"},
        {"id": "soon", "expires": soon.isoformat()},
        {"id": "lost", "tenant": "gamma"},
    )
    judged = await examine_callers(config)
    write_keys(tmp_path, {"id": "ci"}, {"id": "ci", "roles": ["OWNER"]}, {"id": "cd", "sha256": "5" * 63})
    wrong = await examine_callers(config)
    write_keys(tmp_path, {"id": "ci"}, {"id": "ci"})
    twice = await examine_callers(config)
    assert absent == [
        f"!!  API keys: {config}:2: auth.keys_file: {path} does not exist: make it with `keys: []`, and add what "
        "`bough keys create` prints."
    ]
    assert judged == [
        f"ok  API keys: {path}, 5 of them",
        f"!!  API key old: {path}:4: keys[2].expires: it expired at 2020-01-01 00:00:00+00:00: make another key, or "
        "remove the entry",
        f"--  API key soon: {path}:5: keys[3].expires: it expires in 3 days: make another key in time",
        f"!!  API key lost: {path}:6: keys[4].tenant: `tenants` of bough.yaml does not have gamma, so that all its "
        "callers are refused: add it there",
    ]
    assert wrong == [
        f"!!  API keys: {path}:3: keys[1].roles[0]: must be 'RUN', 'READ', 'ADMIN' or 'BILLING'\n"
        f"{path}:4: keys[2].sha256: must be the SHA-256 of a key: 64 of 0-9 and a-f, in quotes"
    ]
    assert twice == [
        f"!!  API keys: {path}:3: keys[1].id: the key ci is also in line 2: remove one of both, or make a key with "
        "another id"
    ]


async def test_certificates_of_callers_need_a_port_that_asks_for_them(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, certificates=[{"id": "spiffe://acme.example/jobs", "tenant": "gamma", "user": "jobs"}]
    )
    assert await examine_callers(config) == [
        f"!!  certificates of callers: {config}:2: auth.certificates: no port asks clients for a certificate: set "
        "server.mtls",
        f"!!  certificates of callers: {config}:3: auth.certificates[0].tenant: `tenants` of bough.yaml does not have "
        "gamma, so that all its callers are refused: add it there",
    ]
