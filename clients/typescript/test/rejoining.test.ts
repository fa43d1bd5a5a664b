import assert from "node:assert/strict";
import { test } from "node:test";
import { BoughError } from "../src/errors.js";
import { Code } from "../src/index.js";
import { Backoff, type Contact, type Rejoining } from "../src/rejoining.js";

const GONE = new BoughError("gone", Code.Unavailable);
const PARKED = new BoughError("parked", Code.Unavailable, { reason: "RUN_PARKED" });
const REFUSED = new BoughError("refused", Code.Unavailable, {
  cause: Object.assign(new Error("connect ECONNREFUSED"), { code: "ECONNREFUSED" }),
});

class Clock {
  time = 0;
  chance = 1;
  readonly now = () => this.time;
  readonly random = () => this.chance;
}

function backoff(rejoining: Rejoining = {}, { isMade = true, timeoutMs = 0 } = {}) {
  const clock = new Clock();
  const contact: Contact = { isMade };
  return { clock, contact, backoff: new Backoff(rejoining, contact, timeoutMs, clock) };
}

test("the bound doubles from 100 ms to 5 s, and begins anew with progress", () => {
  const { backoff: made } = backoff();
  const delays = Array.from({ length: 8 }, () => made.delayAfter(GONE));
  assert.deepEqual(delays, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
  made.progressed();
  assert.equal(made.delayAfter(GONE), 100);
});

test("a delay is anywhere between 0 and the bound", () => {
  const { backoff: made, clock } = backoff();
  clock.chance = 0;
  assert.equal(made.delayAfter(GONE), 0);
  clock.chance = 0.25;
  assert.equal(made.delayAfter(GONE), 50);
});

test("the server's retry delay is a lower bound, itself bounded", () => {
  const { backoff: made, clock } = backoff();
  clock.chance = 0;
  assert.equal(made.delayAfter(new BoughError("", Code.Unavailable, { retryDelayMs: 700 })), 700);
  assert.equal(made.delayAfter(new BoughError("", Code.Unavailable, { retryDelayMs: 90_000 })), 5_000);
});

test("60 s in all without progress end it", () => {
  const { backoff: made, clock } = backoff();
  made.delayAfter(GONE);
  clock.time = 59_799;
  made.delayAfter(GONE);
  clock.time = 59_800;
  assert.throws(() => made.delayAfter(GONE), GONE);
});

test("options that are undefined have their defaults", () => {
  const { backoff: made, clock } = backoff({ timeoutMs: undefined, longestDelayMs: undefined } as object);
  assert.equal(made.delayAfter(GONE), 100);
  clock.time = 60_000;
  assert.throws(() => made.delayAfter(GONE), GONE);
});

test("a client that never reached its server waits half a second", () => {
  const { backoff: made, clock, contact } = backoff({}, { isMade: false });
  made.delayAfter(REFUSED);
  clock.time = 300;
  assert.throws(() => made.delayAfter(REFUSED), REFUSED);
  assert.equal(contact.isMade, false);
  const other = backoff({}, { isMade: false });
  other.backoff.delayAfter(GONE);
  assert.equal(other.contact.isMade, true);
});

test("an accepted call ends the outage, but not for a run that cannot be continued", () => {
  const { backoff: made, clock } = backoff();
  made.delayAfter(GONE);
  clock.time = 50_000;
  made.answered();
  made.delayAfter(PARKED);
  clock.time = 100_000;
  made.answered();
  made.delayAfter(PARKED);
  clock.time = 110_000;
  made.answered();
  assert.throws(() => made.delayAfter(PARKED), PARKED);
});

test("only UNAVAILABLE is retried", () => {
  for (const code of [Code.NotFound, Code.OutOfRange, Code.Internal, Code.DeadlineExceeded, Code.Canceled]) {
    assert.throws(() => backoff().backoff.delayAfter(new BoughError("", code)), { code });
  }
});

test("a stream whose token has expired rejoins once, with the next token", () => {
  const refused = new BoughError("The token has expired.", Code.Unauthenticated);
  const { backoff: made } = backoff();
  assert.throws(() => made.delayAfter(refused), refused);
  for (let count = 0; count < 2; count += 1) {
    made.progressed();
    assert.equal(made.delayAfter(refused), 0);
    assert.throws(() => made.delayAfter(refused), refused);
  }
  assert.equal(made.outages, 0);
});

test("the caller's deadline counts over all calls", () => {
  const { backoff: made, clock } = backoff({}, { timeoutMs: 1_000 });
  assert.equal(made.remainingMs(), 1_000);
  clock.time = 950;
  assert.equal(made.remainingMs(), 50);
  assert.throws(() => made.delayAfter(GONE), { code: Code.DeadlineExceeded });
  clock.time = 1_000;
  assert.throws(() => made.remainingMs(), { code: Code.DeadlineExceeded });
  assert.equal(backoff().backoff.remainingMs(), 0);
});

test("onDrop is called once in each outage", () => {
  const drops: BoughError[] = [];
  const { backoff: made } = backoff({ onDrop: (error) => drops.push(error) });
  made.delayAfter(GONE);
  made.delayAfter(GONE);
  made.progressed();
  made.delayAfter(PARKED);
  assert.deepEqual(drops, [GONE, PARKED]);
});
