package dev.bough.follow;

import io.grpc.ManagedChannel;
import java.time.Duration;

/**
 * How streams follow: over which channel, for how long in all, and whether they rejoin after a drop.
 *
 * @param channel the channel of every call
 * @param timeout how long a stream may last in all, over every call
 * @param rejoins whether it continues after a drop
 */
public record Following(ManagedChannel channel, Duration timeout, boolean rejoins) {
  /** Returns how streams follow that rejoin, for a day at most. */
  public static Following over(ManagedChannel channel) {
    return new Following(channel, Duration.ofDays(1), true);
  }
}
