"""`bough usage`: tables of what runs used, and mistakes on the command line."""

import json
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import usage_pb2
from tests.clients.cli_process import bough, server_of
from tests.support.projects import llm, write_project

USED = {"usage": {"input_tokens": 1_000, "output_tokens": 500}}
PRICED = {
    "provider": "scripted",
    "script": "script.yaml",
    "price": {"input_per_million": 1, "output_per_million": 2},
}


def project(folder: Path, **sections: object) -> Path:
    """Write a project of two agents whose model has a price."""
    called = {"calls": [{"name": "call_clerk", "arguments": {"message": "a"}}], **USED}
    script = {"lead": [called, {"text": "Done.", **USED}], "clerk": [{"text": "Well.", **USED}]}
    return write_project(folder, llm("lead", calls=["clerk"]), llm("clerk"), script=script, model=PRICED, **sections)


async def test_usage_is_printed_by_what_was_asked_for(tmp_path: Path) -> None:
    async with server_of(project(tmp_path)) as port:
        assert (await bough("run", "lead", "hi", port=port)).code == 0
        by_default = await bough("usage", port=port)
        by_agent = await bough("usage", "--by", "agent", "--run", "last", port=port)
        printed = await bough("usage", "--by", "invocation", "--run", "last", "--json", port=port)
        recent = await bough("usage", "--by", "agent", "--since", "1h", port=port)
        await bough("sessions", "delete", "last", port=port)
        after = await bough("usage", "--by", "agent", port=port)
    assert by_default.out.splitlines() == [
        "user   model    runs  calls  tokens      charge",
        "local  -           1      0       -           -",
        "local  default     0      3   4,500  0.0060 USD",
    ]
    assert by_agent.out.splitlines() == [
        "agent  runs  calls  tokens      charge",
        "clerk     0      1   1,500  0.0020 USD",
        "lead      1      2   3,000  0.0040 USD",
    ]
    assert recent == after == by_agent
    groups = [json_format.ParseDict(each, usage_pb2.UsageGroup()) for each in map(json.loads, printed.out.splitlines())]
    assert sorted(group.charge_nanos for group in groups) == [2_000_000, 4_000_000]


async def test_an_account_is_shown_and_adjusted(tmp_path: Path) -> None:
    adjust = ("account", "adjust", "1.5", "USD", "--user", "local", "--note", "Thanks.")
    async with server_of(project(tmp_path, accounts={"per": "user"})) as port:
        refused = await bough("run", "lead", "hi", port=port)
        added = await bough(*adjust, "--request-id", "p1", port=port)
        again = await bough(*adjust, "--request-id", "p1", port=port)
        assert (await bough("run", "lead", "hi", port=port)).code == 0
        shown = await bough("account", "show", port=port)
        taken = await bough(
            *("account", "adjust", "--user", "local", "--request-id", "p2", "--", "-1", "USD"), port=port
        )
    assert (refused.code, "Nothing is left of the account of the user 'local'" in refused.err) == (2, True)
    assert (added.out, again.out) == ("user local: 1.5000 USD\n",) * 2
    balance, header, row = shown.out.splitlines()
    assert balance == "user local: 1.4940 USD"
    assert header.split() == ["made", "amount", "request", "id", "by", "note"]
    assert row.split()[2:] == ["1.5000", "USD", "p1", "local", "Thanks."]
    assert taken.out == "user local: 0.4940 USD\n"


async def test_quotas_are_printed(tmp_path: Path) -> None:
    limits = {"runs_per_minute": 3, "cost_nanos_per_month": 9_000_000}
    tenants = {"local": {"quotas": limits, "user_quotas": {"concurrent_runs": 2, "tokens_per_day": 10_000}}}
    async with server_of(project(tmp_path, tenants=tenants)) as port:
        assert (await bough("run", "lead", "hi", port=port)).code == 0
        shown = await bough("quotas", port=port)
        other = await bough("quotas", "bert", "--json", port=port)
    header, *rows = (line.split() for line in shown.out.splitlines())
    assert header == ["of", "quota", "used", "limit", "reset"]
    assert [row[:-2] for row in rows if row[2] != "concurrent_runs"] == [
        ["tenant", "runs_per_minute", "1", "3"],
        ["tenant", "cost_nanos_per_month", "0.0060", "USD", "0.0090", "USD"],
        ["user", "local", "tokens_per_day", "4,500", "10,000"],
    ]
    assert ["user", "local", "concurrent_runs", "0", "2", "-"] in rows
    statuses = [
        json_format.ParseDict(each, usage_pb2.QuotaStatus()) for each in map(json.loads, other.out.splitlines())
    ]
    assert [(status.user_id, status.used) for status in statuses] == [
        ("", 1),
        ("", 6_000_000),
        ("bert", 0),
        ("bert", 0),
    ]


async def test_a_server_without_quotas_says_so(tmp_path: Path) -> None:
    async with server_of(project(tmp_path)) as port:
        assert (await bough("quotas", port=port)).out == "There are no quotas.\n"


@pytest.mark.parametrize("amount", ["0", "1.0000000001", "much", "NaN", "10000000000"])
async def test_an_amount_that_is_no_amount_is_refused(amount: str) -> None:
    ended = await bough("account", "adjust", amount, "USD", "--user", "anne", "--request-id", "p1")
    assert (ended.code, ended.out) == (2, "")
    assert "AMOUNT" in ended.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--by", "user,colour"), "'colour' is none of user, session, run, agent, invocation, model, day."),
        (("--by", "user,user"), "a dimension is named twice: name each once."),
        (("--by", "invocation"), "invocations are those of one run: add --run RUN."),
        (("--since", "soon"), "soon"),
    ],
)
async def test_a_mistake_is_told_before_a_server_is_looked_for(arguments: tuple[str, ...], why: str) -> None:
    ended = await bough("usage", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert why in " ".join(ended.err.replace("│", " ").split())
