package dev.bough.follow;

import io.grpc.ChannelCredentials;
import io.grpc.CompositeChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import java.net.URI;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import java.util.logging.Level;
import java.util.logging.Logger;
import java.util.regex.Pattern;

/** Channels to a server, which notice a dead connection within a minute. */
public final class Channels {
  /** The parent of gRPC's loggers, which otherwise print to the terminal which transport they use. */
  private static final Logger LOGGER = Logger.getLogger("io.grpc");

  private static final Pattern LOOPBACK = Pattern.compile("localhost|127(\\.\\d{1,3}){3}|\\[::1]");

  private Channels() {}

  /** Returns a channel without TLS, for a server on this machine. */
  public static ManagedChannel plaintext(String address) {
    return open(address, InsecureChannelCredentials.create());
  }

  /**
   * Returns a channel without TLS that sends a bearer token with every call.
   *
   * @param token returns the present token; it is called for each call
   * @throws IllegalArgumentException if the address is not certainly this machine's: tokens travel encrypted
   */
  public static ManagedChannel plaintext(String address, Supplier<String> token) {
    var host = URI.create("bough://" + address).getHost();
    if (host == null || !LOOPBACK.matcher(host).matches()) {
      throw new IllegalArgumentException("A token would travel to " + address + " unencrypted: use Channels.secure.");
    }
    return open(address, CompositeChannelCredentials.create(InsecureChannelCredentials.create(), new BearerToken(token)));
  }

  /**
   * Returns a channel with TLS.
   *
   * @param credentials such as TlsChannelCredentials.create(); its builder takes other authorities by trustManager, and a
   *     certificate of the client by keyManager
   */
  public static ManagedChannel secure(String address, ChannelCredentials credentials) {
    return open(address, credentials);
  }

  /**
   * Returns a channel with TLS that sends a bearer token with every call.
   *
   * @param credentials as of the method without a token
   * @param token returns the present token; it is called for each call
   */
  public static ManagedChannel secure(String address, ChannelCredentials credentials, Supplier<String> token) {
    return open(address, CompositeChannelCredentials.create(credentials, new BearerToken(token)));
  }

  private static ManagedChannel open(String address, ChannelCredentials credentials) {
    LOGGER.setLevel(Level.WARNING);
    return Grpc.newChannelBuilder(address, credentials)
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(false)
        .build();
  }
}
