import { setTimeout as sleep } from "node:timers/promises";
import type { DescService } from "@bufbuild/protobuf";
import { type CallOptions, type Client, Code, createClient, makeAnyClient, type Transport } from "@connectrpc/connect";
import { aborted, BoughError, boughError } from "./errors.js";
import { type Contact, given } from "./rejoining.js";

/** Verbs of unary methods that may be repeated without harm: they read, or what they ask for stays so. */
const REPEATABLE = /^(Cancel|Compare|Diff|Get|List|Score|Validate)/;
const ATTEMPTS = 4;
const FIRST_DELAY_MS = 100;
const LONGEST_DELAY_MS = 2_000;

/** What the calls of a client share. */
export interface CallDefaults {
  /** Timeout of a unary call; 0 for none. */
  callTimeoutMs: number;
  /** Timeout of a stream; 0 for none. */
  timeoutMs: number;
  contact: Contact;
}

type Call<Response> = (options: CallOptions) => Response;

/**
 * Return the generated client of a service with default timeouts and BoughErrors.
 *
 * Unary methods that may be repeated without harm are attempted up to four times if the server is unavailable.
 */
export function serviceClient<Service extends DescService>(
  service: Service,
  transport: Transport,
  defaults: CallDefaults,
): Client<Service> {
  const generated = createClient(service, transport) as Record<string, (...call: unknown[]) => unknown>;
  return makeAnyClient(service, (method) => {
    const call = (request: unknown) => (options: CallOptions) => generated[method.localName]?.(request, options);
    if (method.methodKind === "server_streaming") {
      return (request: unknown, options: CallOptions = {}) =>
        responses(call(request) as Call<AsyncIterable<unknown>>, options, defaults);
    }
    const attempts = method.methodKind === "unary" && REPEATABLE.test(method.name) ? ATTEMPTS : 1;
    const timeoutMs = method.methodKind === "unary" ? defaults.callTimeoutMs : defaults.timeoutMs;
    return (request: unknown, options: CallOptions = {}) =>
      answer(call(request) as Call<Promise<unknown>>, { timeoutMs, ...given(options) }, { attempts, ...defaults });
  }) as Client<Service>;
}

async function answer(
  call: Call<Promise<unknown>>,
  options: CallOptions & { timeoutMs: number },
  { attempts, contact }: { attempts: number; contact: Contact },
): Promise<unknown> {
  const deadline = options.timeoutMs > 0 ? performance.now() + options.timeoutMs : Infinity;
  for (let attempt = 1; ; attempt += 1) {
    const timeoutMs = deadline === Infinity ? 0 : Math.max(1, Math.ceil(deadline - performance.now()));
    try {
      const response = await call({ ...options, timeoutMs });
      contact.isMade = true;
      return response;
    } catch (error) {
      const raised = callError(error, options.signal);
      const delay = Math.random() * Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** (attempt - 1));
      const isLast = attempt === attempts || performance.now() + delay >= deadline;
      if (isLast || !(raised instanceof BoughError) || raised.code !== Code.Unavailable) {
        throw raised;
      }
      await sleep(delay, undefined, { signal: options.signal }).catch((reason) => {
        throw callError(reason, options.signal);
      });
    }
  }
}

async function* responses(
  call: Call<AsyncIterable<unknown>>,
  options: CallOptions,
  { timeoutMs, contact }: CallDefaults,
): AsyncGenerator<unknown> {
  const leaving = new AbortController();
  const signal = options.signal ? AbortSignal.any([options.signal, leaving.signal]) : leaving.signal;
  const stream = call({ timeoutMs, ...given(options), signal })[Symbol.asyncIterator]();
  try {
    for (let next = await stream.next(); !next.done; next = await stream.next()) {
      contact.isMade = true;
      yield next.value;
    }
  } catch (error) {
    throw callError(error, options.signal);
  } finally {
    // Connect ends a call that is left, and clears the timer of its deadline, when a read after the abort fails.
    leaving.abort();
    await stream.next().catch(() => {});
  }
}

function callError(error: unknown, signal: AbortSignal | undefined): unknown {
  return signal?.aborted ? aborted(signal.reason) : boughError(error);
}
