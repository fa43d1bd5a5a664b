import type { SecureClientSessionOptions } from "node:http2";
import { isIPv4 } from "node:net";
import type { Interceptor, Transport } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

/** Certificates of a connection with TLS, as `node:tls` takes them: PEM texts. */
export type TlsOptions = Pick<SecureClientSessionOptions, "ca" | "cert" | "key" | "servername">;

/** How to reach a server. */
export interface ConnectionOptions {
  /** TLS: true for the certificate authorities of Node.js. Default: plaintext. */
  tls?: boolean | TlsOptions;
  /**
   * Bearer token, or a function that is called for the token of each call. Without TLS it is refused unless the address
   * is this machine's own.
   */
  token?: string | (() => string | Promise<string>);
}

/** A transport, and the connection that it uses. */
export interface Connection {
  transport: Transport;
  close: () => void;
}

/** Return the connection to a server at HOST:PORT; it is opened by the first call. */
export function connect(address: string, { tls = false, token }: ConnectionOptions): Connection {
  const baseUrl = addressUrl(address, tls !== false);
  if (token !== undefined && tls === false && !isLoopback(new URL(baseUrl).hostname)) {
    throw new TypeError(`A token would be sent to ${address} in plaintext: set tls, or remove the token.`);
  }
  const sessions = new Http2SessionManager(
    baseUrl,
    { pingIntervalMs: 30_000, pingTimeoutMs: 20_000, pingIdleConnection: false },
    typeof tls === "object" ? tls : {},
  );
  const interceptors = token === undefined ? [] : [withToken(token)];
  return {
    transport: createGrpcTransport({ baseUrl, sessionManager: sessions, interceptors }),
    close: () => sessions.abort(),
  };
}

function addressUrl(address: string, isSecure: boolean): string {
  if (address.includes("/") || !/:\d+$/.test(address) || !URL.canParse(`http://${address}`)) {
    throw new TypeError(`"${address}" is not an address: write HOST:PORT, such as 127.0.0.1:50051.`);
  }
  return `${isSecure ? "https" : "http"}://${address}`;
}

function isLoopback(host: string): boolean {
  return host === "localhost" || host === "[::1]" || (isIPv4(host) && host.startsWith("127."));
}

function withToken(token: string | (() => string | Promise<string>)): Interceptor {
  return (next) => async (request) => {
    request.header.set("authorization", `Bearer ${typeof token === "string" ? token : await token()}`);
    return next(request);
  };
}
