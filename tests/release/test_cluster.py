"""compose.cluster.yaml and deploy/envoy.yaml: three servers on one PostgreSQL behind one address."""

import re
from typing import Any

import yaml

from bough_server.settings import Settings
from tests.release import dockerfile
from tests.release.workflows import ROOT
from tests.support.balancer import ENVOY

SERVERS = 3


def composed() -> dict[str, Any]:
    """The whole of compose.cluster.yaml."""
    made: dict[str, Any] = yaml.safe_load((ROOT / "compose.cluster.yaml").read_text(encoding="utf-8"))
    return made


def test_only_the_balancer_is_reached_and_only_from_this_machine() -> None:
    services = composed()["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"balancer": ["127.0.0.1:50051:50051"]}
    assert services["bough"]["deploy"] == {"replicas": SERVERS}


def test_its_servers_are_that_of_one_server_but_for_the_database() -> None:
    (one,) = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    server = composed()["services"]["bough"]
    same = {"build", "image", "env_file", "restart", "stop_grace_period", "init", "read_only", "tmpfs"}
    assert {name: server[name] for name in same | {"cap_drop", "security_opt"}} == {
        name: one[name] for name in same | {"cap_drop", "security_opt"}
    }
    (project, auth) = server["volumes"]
    assert [project] == [volume for volume in one["volumes"] if not volume.startswith("data:")]
    assert server["environment"]["BOUGH_KEYS_FILE"] == f"{auth.split(':')[-2]}/keys.yaml"
    grace = re.fullmatch(r"(\d+)s", server["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) > Settings().server.drain_grace


def test_servers_and_database_agree_on_the_password_which_is_in_no_url() -> None:
    services = composed()["services"]
    server, database = services["bough"]["environment"], services["postgres"]["environment"]
    assert server["PGPASSWORD"] == database["POSTGRES_PASSWORD"]
    user, name = database["POSTGRES_USER"], database["POSTGRES_DB"]
    assert server["BOUGH_DATABASE"] == f"postgresql://{user}@postgres:5432/{name}"


def test_the_balancer_looks_for_the_servers_by_their_name_and_port() -> None:
    services = composed()["services"]
    (source,) = services["balancer"]["configs"]
    (exposed,) = (rest for name, rest in dockerfile.instructions((ROOT / "Dockerfile").read_text()) if name == "EXPOSE")
    configured = yaml.safe_load(ENVOY.read_text())["static_resources"]
    (cluster,), (listener,) = configured["clusters"], configured["listeners"]
    (endpoints,) = cluster["load_assignment"]["endpoints"]
    (endpoint,) = endpoints["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": "bough", "port_value": int(exposed)}
    assert listener["address"]["socket_address"]["port_value"] == 50051
    assert (ROOT / composed()["configs"][source["source"]]["file"]) == ENVOY
    assert source["target"] in services["balancer"]["command"]


def test_the_certificate_is_where_the_balancer_looks_for_it() -> None:
    balancer = composed()["services"]["balancer"]
    (chain,) = yaml.safe_load(ENVOY.read_text())["static_resources"]["listeners"][0]["filter_chains"]
    (used,) = chain["transport_socket"]["typed_config"]["common_tls_context"]["tls_certificates"]
    files = [file["filename"] for file in used.values()]
    assert balancer["volumes"] == ["${BOUGH_TLS:-./tls}:/etc/envoy/tls:ro"]
    assert files == ["/etc/envoy/tls/server.crt", "/etc/envoy/tls/server.key"]
