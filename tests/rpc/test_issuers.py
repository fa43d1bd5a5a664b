"""Access tokens of OpenID Connect issuers: what they prove, what is refused, and issuers that fail."""

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from bough.v1 import access_service_pb2, agent_service_pb2, options_pb2
from bough_server.auth import issuer_keys
from bough_server.auth.issuer_keys import IssuerUnavailable, parse_keys
from bough_server.auth.issuers import MAX_CACHED, Issuers
from bough_server.auth.sections import OidcSection
from bough_server.clock import SystemClock
from bough_server.errors import Unauthenticated
from bough_server.identity import ADMIN, READ, RUN
from tests.rpc.agents import GATES
from tests.rpc.run_server import Served, Turn, said, served, settings
from tests.rpc.test_callers import EXPIRED, INVALID, refusal
from tests.support.callers import bearer, stubs
from tests.support.issuer import Issuer, drip, flood, hang, issuing

WHO: Final = access_service_pb2.GetCallerRequest()


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    """An issuer."""
    async with issuing() as serving:
        yield serving


@pytest.fixture
async def server(tmp_path: Path, issuer: Issuer) -> AsyncIterator[Served]:
    """A server that takes its tokens."""
    tenants = {"acme": {}, "beta": {}}
    section = issuer.section(leeway=0)
    async with served(settings(tmp_path, auth={"oidc": [section]}, tenants=tenants)) as serving:
        yield serving


def issuers_of(issuer: Issuer, **changes: Any) -> Issuers:
    """Return what checks the tokens of an issuer, without a server."""
    section = OidcSection.model_validate(issuer.section(**changes))
    return Issuers([section], clock=SystemClock(), on_problem=lambda: None)


async def why(issuers: Issuers, token: str) -> str:
    """Return why a token is refused."""
    with pytest.raises(Unauthenticated) as caught:
        await issuers.check(token)
    return caught.value.why


async def test_a_token_proves_a_caller_with_its_roles_and_groups(server: Served, issuer: Issuer) -> None:
    token = issuer.token(org="beta", sub="auth0|anne", roles=["READ", "something else"], groups="finance legal")
    known = await stubs(server.channel, bearer(token)).access.GetCaller(WHO)
    claims = jwt.decode(token, options={"verify_signature": False})
    expected = access_service_pb2.GetCallerResponse(
        tenant_id="beta",
        user_id="auth0|anne",
        roles=[options_pb2.ACCESS_ROLE_READ],
        groups=["finance", "legal"],
        via=f"oidc/{issuer.url}",
    )
    expected.expire_time.FromSeconds(claims["exp"])
    assert known == expected
    assert await refusal(stubs(server.channel, bearer(issuer.token(org="gamma"))).access.GetCaller(WHO)) == INVALID
    old = issuer.token(iat=int(time.time()) - 60, exp=int(time.time()) - 1)
    assert await refusal(stubs(server.channel, bearer(old)).access.GetCaller(WHO)) == EXPIRED


async def test_tenant_and_roles_can_be_fixed_and_claims_lie_in_objects(issuer: Issuer) -> None:
    fixed = issuers_of(issuer, tenant="beta", tenant_claim=None, roles=["ADMIN"], roles_claim=None, user_claim="email")
    caller = (await fixed.check(issuer.token(org=None, email="a@b", roles=["READ"]))).caller
    assert (caller.principal.tenant_id, caller.principal.user_id, caller.roles) == ("beta", "a@b", {ADMIN})
    nested = issuers_of(issuer, roles_claim="realm.roles", tenant_claim="https://acme.example/org")
    claims = {"realm": {"roles": ["RUN", "READ"]}, "https://acme.example/org": "beta"}
    caller = (await nested.check(issuer.token(**claims))).caller
    assert (caller.principal.tenant_id, caller.roles) == ("beta", {RUN, READ})
    by_default = (await issuers_of(issuer).check(issuer.token(roles=["viewer"]))).caller
    assert by_default.roles == {RUN}


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_a_token_that_is_not_as_it_should_be_is_refused(issuer: Issuer) -> None:
    issuer.add_curve("curve")
    issuer.add("short", bits=1024)
    now = int(time.time())
    claims = issuer.claims()
    public = issuer.keys["first"].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    header = jwt.utils.base64url_encode(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "first"}).encode()).decode()
    payload = jwt.utils.base64url_encode(json.dumps(claims).encode()).decode()
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
        f"{header}.{payload}".encode(), pem
    )
    by_public_key = f"{header}.{payload}.{jwt.utils.base64url_encode(signature).decode()}"
    kind = "its signature is of a kind that auth.oidc does not have for the issuer"
    no_name, no_time = "its user is no id of a user", "its exp is no time"
    no_access = "it is no access token"
    deep = base64.urlsafe_b64encode(b"[" * 9_000).decode()
    cases = {
        issuer.token(key_id="curve"): kind,
        by_public_key: kind,
        jwt.encode(claims, None, algorithm="none"): kind,
        issuer.token(exp=None): "MissingRequiredClaimError",
        issuer.token(iat=None): "MissingRequiredClaimError",
        issuer.token(sub=None): "MissingRequiredClaimError",
        issuer.token(aud="other"): "InvalidAudienceError",
        issuer.token(iss="https://other.example"): "auth.oidc does not have its issuer",
        issuer.token(nonce="n"): no_access,
        issuer.token(at_hash="h"): no_access,
        issuer.token(typ="ID"): no_access,
        issuer.token(headers={"typ": "logout+jwt"}): no_access,
        issuer.token(key_id="short"): "its key is not among those of the issuer",
        issuer.token(key_id="first", headers={"kid": "none"}): "its key is not among those of the issuer",
        issuer.token(sub="a\0b"): no_name,
        issuer.token(sub="a\ud800b"): no_name,
        issuer.token(sub=""): no_name,
        issuer.token(sub="bough/rules"): no_name,
        issuer.token(sub="x" * 129): no_name,
        issuer.token(org="Acme"): "its tenant is no id of a tenant",
        issuer.token(org=["acme"]): "its tenant is no id of a tenant",
        issuer.token(roles={"RUN": True}): "its roles is no list of at most 64 names",
        issuer.token(groups=["g"] * 65): "its groups is no list of at most 64 names",
        issuer.token(groups=["a\nb"]): "its groups has what is no name",
        issuer.token(exp=1e300): no_time,
        issuer.token(exp=now + 90_000): "it expires later than the max_lifetime of auth.oidc allows",
        issuer.token(iat=now + 90): "it is not valid yet",
        issuer.token(nbf=now + 90): "it is not valid yet",
        "x": "it is no token: it has not three parts",
        "x.y.z": "it is no token: a part of it is not base64 of JSON",
        "e30.W10.z": "it is no token: a part of it is no JSON object",
        f"{deep}.e30.z": "it is no token: a part of it is not base64 of JSON",
        f"{issuer.token()}x": "DecodeError",
    }
    del issuer.keys["short"]
    issuers = issuers_of(issuer)
    assert {token: await why(issuers, token) for token in cases} == cases
    with_type = issuers_of(issuer, token_type="at+jwt")
    assert await why(with_type, issuer.token()) == no_access
    assert (await with_type.check(issuer.token(headers={"typ": "AT+JWT"}))).caller.principal.user_id == "anne"


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_a_key_that_is_too_short_is_refused(issuer: Issuer) -> None:
    issuer.add("short", bits=1024)
    assert await why(issuers_of(issuer), issuer.token(key_id="short")) == "InvalidKeyError"


async def test_mutated_tokens_are_refused_or_the_original(issuer: Issuer) -> None:
    issuers, token, chance = issuers_of(issuer), issuer.token(), random.Random(26)
    expected = (await issuers.check(token)).caller
    accepted = set()
    for _ in range(3_000):
        text = list(token)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(text))
            match chance.randrange(3):
                case 0:
                    text[place] = chr(chance.choice([*range(32, 127), 0, 0x100, 0xD800]))
                case 1:
                    text[place : place + chance.randint(1, 40)] = []
                case _:
                    text[place:place] = text[place : place + 20]
            text = text or list("x")
        with suppress(Unauthenticated):
            accepted.add((await issuers.check("".join(text))).caller)
    assert accepted <= {expected}


async def test_keys_are_fetched_once_for_those_that_are_known_and_soon_for_one_that_is_not(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuers, token = issuers_of(issuer), issuer.token()
    await asyncio.gather(*(issuers.check(issuer.token(sub=f"u{number}")) for number in range(20)))
    assert issuer.fetches == 1
    issuer.add("second")
    assert await why(issuers, issuer.token(key_id="second")) == "its key is not among those of the issuer"
    assert issuer.fetches == 1
    monkeypatch.setattr(issuer_keys, "RETRY_SECONDS", 0.0)
    later = issuers_of(issuer)
    await later.check(token)
    issuer.add("third")
    await asyncio.gather(*(later.check(issuer.token(key_id="third", sub=f"u{number}")) for number in range(20)))
    assert issuer.fetches == 3
    # An outage refuses no key that is known.
    issuer.behavior = hang
    assert (await later.check(issuer.token(sub="bert"))).caller.principal.user_id == "bert"


async def _html(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


async def _redirect(_: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize("behavior", [hang, drip, flood, _html, _redirect])
async def test_an_issuer_that_fails_is_waited_for_briefly_and_refused(
    issuer: Issuer, behavior: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "WAIT_SECONDS", 0.2)
    issuer.behavior = behavior
    issuers = issuers_of(issuer)
    begin = time.monotonic()
    refused = await asyncio.gather(*(why(issuers, issuer.token(sub=f"u{number}")) for number in range(20)))
    assert set(refused) == {"its key is not among those of the issuer"}
    assert time.monotonic() - begin < 2.0
    assert issuer.fetches == 1
    await issuers.close()


def test_a_key_set_that_is_not_sound_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer()
    (first,) = issuer.key_set()["keys"]
    unusable = [{"kty": "oct", "k": "AAAA", "kid": "o"}, {"kty": "RSA", "kid": "r"}, "x", {"kty": "new", "kid": "n"}]
    assert parse_keys({"keys": [*unusable, first]}, ["RS256"]).keys() == {("first", "RS256")}
    assert parse_keys({"keys": [{**first, "d": "AQAB"}]}, ["RS256"])["first", "RS256"].key.key_size == 2048
    for document, problem in (
        ({"keys": []}, "has no key that makes the signatures"),
        ({"keys": unusable}, "has no key that makes the signatures"),
        ({"keys": [first, first]}, "has two keys of one kid"),
        ({"keys": [{**first, "kid": 5}]}, "A kid is no text"),
        ({"keys": [first] * 65}, "has more than 64 keys"),
        ({"keys": {}}, "has no list of keys"),
        ([], "has no list of keys"),
    ):
        with pytest.raises(IssuerUnavailable, match=problem):
            parse_keys(document, ["RS256"])


async def test_the_tokens_that_were_seen_before_are_bounded(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough_server.auth.issuers.MAX_CACHED", 2)
    issuers, verified = issuers_of(issuer), []
    await issuers.check(issuer.token())  # fetches the keys, and a change of these empties the cache
    decode = jwt.decode
    monkeypatch.setattr(jwt, "decode", lambda *args, **options: verified.append(1) or decode(*args, **options))
    tokens = [issuer.token(sub=f"u{number}") for number in range(3)]
    for token in [tokens[0], tokens[0], tokens[1], tokens[2], tokens[2], tokens[0]]:
        await issuers.check(token)
    assert len(verified) == 4
    assert MAX_CACHED == 4_096


async def test_a_stream_ends_with_its_token_and_a_new_one_follows_the_same_run(server: Served, issuer: Issuer) -> None:
    short = issuer.token(exp=int(time.time()) + 2)
    request = agent_service_pb2.RunRequest(agent="waiter", input=said("expires"), request_id="ask")
    turn = await Turn(call=stubs(server.channel, bearer(short)).agents.Run(request)).until("run_started")
    assert await refusal(turn.to_the_end()) == EXPIRED
    again = Turn(call=stubs(server.channel, bearer(issuer.token())).agents.Run(request))
    await again.until("run_started")
    GATES["expires"].set()
    await again.to_the_end()
    assert (await again.run_id(), again.kinds[-1]) == (await turn.run_id(), "run_completed")


async def test_a_call_whose_token_has_expired_since_it_began_has_one_run(server: Served, issuer: Issuer) -> None:
    old = issuer.token(exp=int(time.time()) + 1, iat=int(time.time()) - 10)
    request = agent_service_pb2.RunRequest(agent="echo", input=said("hi"), request_id="once")
    first = stubs(server.channel, bearer(old)).agents.Run(request)
    second = stubs(server.channel, bearer(issuer.token())).agents.Run(request)
    ids = {await Turn(call=call).run_id() for call in (first, second)}
    assert len(ids) == 1
    assert (await Turn(call=second).to_the_end()).kinds[-1] == "run_completed"


def test_settings_name_what_is_wrong_with_an_issuer() -> None:
    right = {"issuer": "https://login.acme.example", "audience": "bough", "tenant": "acme"}
    for changes, problem in (
        ({"issuer": "http://login.acme.example"}, "must begin with https://"),
        ({"algorithms": ["HS256"]}, "HS256 would let others than the issuer make tokens"),
        ({"algorithms": []}, "needs at least one of algorithms"),
        ({"tenant_claim": "org"}, "needs exactly one of tenant and tenant_claim"),
        ({"tenant": None}, "needs exactly one of tenant and tenant_claim"),
        ({"tenant": "Acme"}, "must be 1 to 63 of a-z"),
        ({"leeway": "5m"}, "less than or equal to 60"),
        ({"roles": ["RUN"], "roles_claim": "roles"}, "takes roles or roles_claim, not both"),
    ):
        with pytest.raises(ValueError, match=problem):
            OidcSection.model_validate({**right, **changes})
