package dev.bough.follow;

import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import java.util.concurrent.TimeUnit;
import java.util.logging.Level;
import java.util.logging.Logger;

/** Channels to a server. */
public final class Channels {
  /** The parent of gRPC's loggers, which otherwise print to the terminal which transport they use. */
  private static final Logger LOGGER = Logger.getLogger("io.grpc");

  private Channels() {}

  /** Returns a channel without TLS, for a server on this machine, which notices a dead connection within a minute. */
  public static ManagedChannel plaintext(String address) {
    LOGGER.setLevel(Level.WARNING);
    return Grpc.newChannelBuilder(address, InsecureChannelCredentials.create())
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(false)
        .build();
  }
}
