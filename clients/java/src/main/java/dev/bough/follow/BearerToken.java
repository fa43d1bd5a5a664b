package dev.bough.follow;

import io.grpc.CallCredentials;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.concurrent.Executor;
import java.util.function.Supplier;
import java.util.regex.Pattern;

/** Sends a token as {@code authorization: Bearer TOKEN} with every call. */
final class BearerToken extends CallCredentials {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private static final Pattern TOKEN = Pattern.compile("[!-~]+");

  private final Supplier<String> token;

  BearerToken(Supplier<String> token) {
    this.token = token;
  }

  @Override
  public void applyRequestMetadata(RequestInfo request, Executor executor, MetadataApplier applier) {
    executor.execute(
        () -> {
          try {
            var present = token.get();
            if (!TOKEN.matcher(present).matches()) {
              // The token is not shown: it may be right but for a line break.
              applier.fail(Status.UNAUTHENTICATED.withDescription("The token is empty or has characters that no bearer token has."));
              return;
            }
            var headers = new Metadata();
            headers.put(AUTHORIZATION, "Bearer " + present);
            applier.apply(headers);
          } catch (RuntimeException error) {
            applier.fail(Status.UNAUTHENTICATED.withDescription("There is no token.").withCause(error));
          }
        });
  }
}
