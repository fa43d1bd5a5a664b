/** Client for Bough. The messages of the schema are in `@bough-dev/bough/v1`. */
export { Code } from "@connectrpc/connect";
export { BoughClient, type ClientOptions, type RunInit, type StreamOptions } from "./client.js";
export { type CollectedEvaluation, type CollectedRun, collect, collectEvaluation } from "./collect.js";
export { BoughError, type ErrorDetails, type FieldViolation } from "./errors.js";
export { HealthCheckResponse_ServingStatus as ServingStatus } from "./grpc/health/v1/health_pb.js";
export { approve, refuse, reply, textOf, toolOutcome, type UserInput, userMessage } from "./messages.js";
export type { Rejoining } from "./rejoining.js";
export { EventStream } from "./stream.js";
export type { ConnectionOptions, TlsOptions } from "./transport.js";
export { AgentTree } from "./tree.js";
