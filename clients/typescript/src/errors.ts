import type { DescMessage } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./google/rpc/error_details_pb.js";

/** A field of a request that breaks a rule. */
export interface FieldViolation {
  /** Path of the field, such as `definitions[0].llm.model`. */
  readonly field: string;
  readonly description: string;
}

/** What gRPC sends, with the code CANCELLED, to calls in flight when a server stops: github.com/grpc/grpc/issues/41785. */
const NEVER_ACCEPTED = "CANCELLED";

/** What a {@link BoughError} is made of, besides its code and message. */
export interface ErrorDetails {
  reason?: string;
  metadata?: Readonly<Record<string, string>>;
  violations?: readonly FieldViolation[];
  retryDelayMs?: number | undefined;
  cause?: unknown;
}

/**
 * The server refused a call or was not reached.
 *
 * `message` is a sentence for the person who meets the error; programs decide by `code` and `reason`. A run that fails
 * is not an error of the call: its end is an event.
 */
export class BoughError extends Error {
  override readonly name = "BoughError";

  /** The gRPC status code. */
  readonly code: Code;

  /** Name of an `ErrorReason` without its prefix, such as `SESSION_BUSY`; empty if the server sent none. */
  readonly reason: string;

  /** Metadata of the reason, such as `run_id`; `docs/reference/errors.md` lists them. */
  readonly metadata: Readonly<Record<string, string>>;

  /** Every field that breaks a rule, if the code is `InvalidArgument`. */
  readonly violations: readonly FieldViolation[];

  /** Milliseconds that the server asks its clients to wait before they repeat the call; undefined if it does not say. */
  readonly retryDelayMs: number | undefined;

  constructor(message: string, code: Code, details: ErrorDetails = {}) {
    super(message, { cause: details.cause });
    this.code = code;
    this.reason = details.reason ?? "";
    this.metadata = details.metadata ?? {};
    this.violations = details.violations ?? [];
    this.retryDelayMs = details.retryDelayMs;
  }

  /** The code's name as gRPC writes it, such as `NOT_FOUND`. */
  get codeName(): string {
    // gRPC writes CANCELLED, Connect writes Canceled.
    return this.code === Code.Canceled ? "CANCELLED" : Code[this.code].replaceAll(/\B[A-Z]/g, "_$&").toUpperCase();
  }
}

/** Return any error of a call as a BoughError; an error that is none of a call's is returned as it is. */
export function boughError(error: unknown): unknown {
  if (!(error instanceof ConnectError)) {
    return error;
  }
  if (!isFromServer(error)) {
    return isDrop(error) ? dropped(error) : ofConnect(error);
  }
  if (error.code === Code.Canceled && error.rawMessage === NEVER_ACCEPTED) {
    return new BoughError("The server stopped before it accepted the call; repeat it.", Code.Unavailable, {
      cause: error,
    });
  }
  const info = detail(error, ErrorInfoSchema);
  const delay = detail(error, RetryInfoSchema)?.retryDelay;
  return new BoughError(error.rawMessage || "The call failed.", error.code, {
    reason: info?.reason ?? "",
    metadata: info?.metadata ?? {},
    violations: (detail(error, BadRequestSchema)?.fieldViolations ?? []).map(({ field, description }) => ({
      field,
      description,
    })),
    retryDelayMs: delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6,
    cause: error,
  });
}

/** Return the error of a deadline that passed in the client. */
export function deadlineExceeded(message: string, cause?: unknown): BoughError {
  return new BoughError(message, Code.DeadlineExceeded, { reason: "DEADLINE_EXCEEDED", cause });
}

/** Return the error for a call that the caller's AbortSignal ended. */
export function aborted(reason: unknown): BoughError {
  if (reason instanceof Error && reason.name === "TimeoutError") {
    return deadlineExceeded("The caller's signal timed out.", reason);
  }
  return new BoughError("The caller cancelled the call.", Code.Canceled, { cause: reason });
}

/** True if no connection to the server could be made: its address is wrong, or it does not run. */
export function isUnreachable(error: BoughError): boolean {
  const code = systemCode(error);
  return error.code === Code.Unavailable && code !== "" && !isLostConnection(code);
}

function detail<Desc extends DescMessage>(error: ConnectError, schema: Desc) {
  return error.findDetails(schema)[0];
}

function isFromServer(error: ConnectError): boolean {
  return error.metadata.has("grpc-status");
}

/**
 * True for errors by which a lost connection shows.
 *
 * Connect reports them with the codes of HTTP/2 or Node.js errors (Aborted, Canceled, Internal) or, if a response was cut
 * in the middle, as a "protocol error" with the code Internal or InvalidArgument.
 */
function isDrop(error: ConnectError): boolean {
  return (
    systemCode(error) !== "" ||
    /^(http\/2 stream closed|protocol error: (missing status|incomplete envelope|promised))/.test(error.rawMessage)
  );
}

function dropped(error: ConnectError): BoughError {
  return new BoughError(`The server cannot be reached: ${error.rawMessage || systemCode(error)}`, Code.Unavailable, {
    cause: error,
  });
}

function ofConnect(error: ConnectError): BoughError {
  return error.code === Code.DeadlineExceeded
    ? deadlineExceeded("The deadline of the call has passed.", error)
    : new BoughError(error.rawMessage, error.code, { cause: error });
}

function isLostConnection(code: string): boolean {
  return code === "ECONNRESET" || code === "EPIPE" || /^ERR_(HTTP2|STREAM)_/.test(code);
}

/** Return the code of the Node.js error that caused an error, such as ECONNREFUSED; empty if there is none. */
function systemCode(error: Error): string {
  let current: unknown = error;
  while (current instanceof Error) {
    if ("code" in current && typeof current.code === "string") {
      return current.code;
    }
    current = current.cause;
  }
  return "";
}
