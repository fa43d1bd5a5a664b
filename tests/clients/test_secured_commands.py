"""Commands against a server with TLS, with certificates of clients and with tokens, and as a caller of a database."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from tests.clients.cli_process import Finished, bough
from tests.clients.run_events import desk
from tests.clients.test_connection_security import serve_tokens
from tests.support.certificates import DAY, Authority, certificate
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project

SERVERS, CLIENTS = Authority("servers"), Authority("clients")


def project(folder: Path, **server: object) -> Path:
    """A project whose server has TLS, and a port for clients with certificates."""
    (folder / "clients.crt").write_bytes(CLIENTS.pem)
    tls = {"cert_file": "server.crt", "key_file": "server.key"}
    section = {"tls": tls, "mtls": {"port": 0, "client_ca_file": "clients.crt"}, **server}
    return write_project(folder, llm("alone"), script={"alone": ["Hm."] * 9}, server=section)


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[tuple[Serving, Path]]:
    """A server with a certificate for 127.0.0.1; yield it and the file with its authority."""
    SERVERS.issue().write(folder / "server.crt", folder / "server.key")
    (folder / "servers.crt").write_bytes(SERVERS.pem)
    async with serving(project(folder)) as server:
        yield server, folder / "servers.crt"


def client_of(folder: Path, **client: object) -> Path:
    """A configuration of commands alone; the rest of it, which is another server's, is not valid."""
    folder.mkdir(exist_ok=True)
    config = folder / "bough.yaml"
    values = {"client": {name: str(value) for name, value in client.items()}, "server": {"prt": 1}}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    return config


def mtls_address(server: Serving) -> str:
    """The port for clients with certificates."""
    return str(re.findall(r"mtls=(\S+)", server.said)[0])


async def test_on_the_servers_machine_its_own_configuration_is_enough_whatever_its_certificate_names(
    tmp_path: Path,
) -> None:
    SERVERS.issue(x509.DNSName("*.bough.example")).write(tmp_path / "server.crt", tmp_path / "server.key")
    config = project(tmp_path)
    async with serving(config) as server:
        ran = await bough("--config", str(config), "run", "alone", "hi", "--output", "answer")
        healthy = await bough("--config", str(config), "health")
        doctor = await bough("--config", str(config), "doctor")
    assert (ran.code, ran.out) == (0, "Hm.\n")
    assert healthy == Finished(code=0, out=f"serving {server.address}\n", err="")
    assert f"ok  server: {server.address} answers" in doctor.out


async def test_a_named_server_is_reached_with_the_files_of_the_client_section(tmp_path: Path) -> None:
    mine = CLIENTS.issue()
    mine.write(tmp_path / "mine.crt", tmp_path / "mine.key")
    async with secured(tmp_path) as (server, authority):
        own = {"cert_file": tmp_path / "mine.crt", "key_file": tmp_path / "mine.key"}
        plain = client_of(tmp_path / "plain", ca_file=authority)
        mutual = client_of(tmp_path / "mutual", ca_file=authority, **own)
        seen = {
            (address, config.parent.name): (
                await bough("--config", str(config), "--address", address, "run", "alone", "hi", "--output", "answer"),
                await bough("--config", str(config), "--address", address, "health"),
            )
            for address, config in ((server.address, plain), (mtls_address(server), mutual))
        }
        refused = await bough("--config", str(plain), "--address", mtls_address(server), "health")
        unencrypted = await bough("--address", server.address, "runs")
    for (address, _), (ran, healthy) in seen.items():
        assert (ran.code, ran.out, healthy.out) == (0, "Hm.\n", f"serving {address}\n")
    assert (refused.code, "that client.cert_file is one that it accepts" in refused.err) == (1, True)
    assert (unencrypted.code, "set client.tls or client.ca_file" in unencrypted.err) == (2, True)


@pytest.mark.parametrize(
    ("client", "problem"),
    [
        ({"ca_file": "gone.crt"}, "client.ca_file: {folder}/gone.crt cannot be read: No such file or directory."),
        ({"ca_file": "bough.yaml"}, "client.ca_file: {folder}/bough.yaml must be PEM, beginning with -----BEGIN."),
        ({"cert_file": "a"}, "client: cert_file and key_file belong together: set both, or none"),
    ],
)
async def test_files_of_the_client_section_that_cannot_be_used_are_reported_with_their_line(
    tmp_path: Path, client: Mapping[str, str], problem: str
) -> None:
    config = client_of(tmp_path, **client)
    ended = await bough("--config", str(config), "--address", "127.0.0.1:1", "runs")
    line = 2 if "ca_file" in client else 1
    assert ended == Finished(code=2, out="", err=f"{config}:{line}: {problem.format(folder=tmp_path)}\n")


async def test_the_token_of_the_variable_is_sent_and_never_shown(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    encrypted = client_of(tmp_path / "client", ca_file=pem, token_env="MY_TOKEN")
    async with serve_tokens() as (plain, seen_plain), serve_tokens(pem) as (secure, seen_secure):
        run = ("run", "lead", "hi", "--output", "json")
        ended = [
            await bough("--address", plain, *run, environment={"BOUGH_TOKEN": "secret"}),
            await bough("--config", str(encrypted), "--address", secure, *run, environment={"MY_TOKEN": "secret"}),
        ]
        port = plain.rpartition(":")[2]
        exposed = await bough("--address", f"0.0.0.0:{port}", *run, environment={"BOUGH_TOKEN": "secret"})
        broken = await bough("--address", plain, *run, environment={"BOUGH_TOKEN": "sec ret"})
    assert [(each.code, len(each.out.splitlines())) for each in ended] == [(0, len(desk()))] * 2
    assert {token for token in seen_plain + seen_secure if token} == {"Bearer secret"}
    assert exposed == Finished(
        code=2,
        out="",
        err=f"The token would travel to 0.0.0.0:{port} unencrypted: set client.tls to true in bough.yaml.\n",
    )
    words = "The variable BOUGH_TOKEN holds no bearer token: such a token has no spaces or line breaks.\n"
    assert broken == Finished(code=2, out="", err=words)
    assert "secret" not in "".join(each.out + each.err for each in ended)


async def test_a_command_that_opens_the_database_acts_as_the_caller_that_it_is_told(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."] * 9})
    flags = ("--config", str(config))
    jane = ("--embedded", "--as", "acme/auth0|jane")
    ran = await bough(*flags, *jane, "run", "alone", "hi", "--output", "answer")
    hers = await bough(*flags, "runs", "--json", *jane)
    local = await bough(*flags, "--embedded", "runs", "--json")
    wrong = await bough(*flags, "--embedded", "--as", "acme", "runs")
    async with serving(config) as server:
        served = await bough(*flags, "--as", "acme/jane", "runs")
    assert (ran.code, ran.out) == (0, "Hm.\n")
    assert (hers.out.count('"runId"'), local.out.count('"runId"')) == (1, 0)
    assert (wrong.code, "must be TENANT/USER, such as acme/jane." in wrong.err) == (2, True)
    assert served == Finished(
        code=2,
        out="",
        err=f"--as applies only to a server inside the command, and a server runs at {server.address}, which knows its "
        "callers by their tokens: omit --as.\n",
    )


async def test_the_doctor_judges_certificates_and_keys_with_the_lines_that_name_them(tmp_path: Path) -> None:
    SERVERS.issue(ends=90 * DAY).write(tmp_path / "server.crt", tmp_path / "server.key")
    CLIENTS.issue(ends=3 * DAY).write(tmp_path / "mine.crt", tmp_path / "mine.key")
    (tmp_path / "servers.crt").write_bytes(SERVERS.pem)
    (tmp_path / "clients.crt").write_bytes(CLIENTS.pem)
    config = tmp_path / "bough.yaml"
    config.write_text(
        "server:\n  tls:\n    cert_file: server.crt\n    key_file: server.key\n"
        "  mtls: {port: 0, client_ca_file: clients.crt}\n"
        "client: {ca_file: servers.crt, cert_file: mine.crt, key_file: mine.key}\n",
        encoding="utf-8",
    )
    well = await _examined(config)
    (tmp_path / "server.key").chmod(0o644)
    (tmp_path / "clients.crt").write_text("no PEM")
    CLIENTS.issue().write(tmp_path / "other.crt", tmp_path / "mine.key")
    ill = await _examined(config)
    assert well == [
        f"ok  certificate of the server: {tmp_path}/server.crt, for 127.0.0.1; expires in 89 days",
        f"ok  authorities in server.client_ca_file: {tmp_path}/clients.crt",
        f"ok  authorities in client.ca_file: {tmp_path}/servers.crt",
        f"--  certificate of the client: {tmp_path}/mine.crt, for 127.0.0.1; expires in 2 days: renew it, unless that "
        "happens by itself",
    ]
    place, damaged = f"{config}:5: server.mtls.client_ca_file", f"{tmp_path}/clients.crt has no certificates, or one"
    assert ill == [
        well[0],
        f"!!  key of the server: {config}:4: server.tls.key_file: every user of this machine can read "
        f"{tmp_path}/server.key: remove the right, as `chmod o-r` does",
        f"!!  authorities in server.client_ca_file: {place}: {damaged} that is damaged: it must be PEM, with "
        "-----BEGIN CERTIFICATE----- before each.",
        well[2],
        f"!!  certificate of the client: {config}:6: client.cert_file: {tmp_path}/mine.key is not the key of the "
        f"certificate in {tmp_path}/mine.crt: take files that were made together. The certificate that the key belongs "
        "to comes first in its file.",
    ]


async def _examined(config: Path) -> list[str]:
    ended = await bough("--config", str(config), "--embedded", "doctor")
    return [line for line in ended.out.splitlines() if re.match(r"(ok|--|!!)  (certificate|key|authorities) ", line)]
