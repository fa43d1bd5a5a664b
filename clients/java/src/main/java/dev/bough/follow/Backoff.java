package dev.bough.follow;

import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.net.ConnectException;
import java.net.UnknownHostException;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * When a stream is continued after an error: on UNAUTHENTICATED once, if its last call was accepted; on UNAVAILABLE, after a random delay of up to 0.1 seconds, doubling to 5, for a minute
 * without progress. A server that was never reached is given half a second, since its address is probably wrong.
 */
final class Backoff {
  private static final double FIRST_SECONDS = 0.1;
  private static final double LONGEST_SECONDS = 5;
  private static final double TIMEOUT_SECONDS = 60;
  private static final double CONNECT_TIMEOUT_SECONDS = 0.5;

  /** Reasons why a reachable server cannot continue a run. */
  private static final Set<String> OF_THE_RUN = Set.of("STORAGE_FAILED", "RUN_PARKED");

  private final Deadline deadline;
  private int attempt;
  private Long goneSince;
  private boolean isReached;
  private boolean isStuck;
  private boolean isAuthenticated;
  private int drops;

  Backoff(Deadline deadline) {
    this.deadline = deadline;
  }

  /** Returns how often the stream was dropped, once for each outage. */
  int drops() {
    return drops;
  }

  /** Notes that the server has accepted a call. It still may be unable to continue the run. */
  void answered() {
    isReached = true;
    isAuthenticated = true;
    if (!isStuck) {
      goneSince = null;
    }
  }

  /** Notes a response. */
  void progressed() {
    isReached = true;
    isAuthenticated = true;
    isStuck = false;
    attempt = 0;
    goneSince = null;
  }

  /** Returns how long to wait before the next call; throws the error if there is to be none. */
  Duration delayAfter(StatusRuntimeException error) {
    if (error.getStatus().getCode() == Status.Code.UNAUTHENTICATED && isAuthenticated) {
      // The token has expired under the stream; the next call has the present one.
      isAuthenticated = false;
      return Duration.ZERO;
    }
    if (error.getStatus().getCode() != Status.Code.UNAVAILABLE) {
      throw error;
    }
    var details = ErrorDetails.of(error);
    isReached = isReached || !isConnectionFailure(error);
    isStuck = OF_THE_RUN.contains(details.reason());
    long now = System.nanoTime();
    boolean isNew = goneSince == null;
    goneSince = isNew ? now : goneSince;
    double bound = Math.min(LONGEST_SECONDS, FIRST_SECONDS * Math.pow(2, Math.min(attempt++, 32)));
    double seconds = ThreadLocalRandom.current().nextDouble(bound);
    seconds = Math.max(seconds, Math.min(details.retrySeconds(), LONGEST_SECONDS));
    if ((now - goneSince) / 1e9 + seconds >= (isReached ? TIMEOUT_SECONDS : CONNECT_TIMEOUT_SECONDS)) {
      throw error;
    }
    if (deadline.timeRemaining(TimeUnit.NANOSECONDS) <= seconds * 1e9) {
      throw Status.DEADLINE_EXCEEDED
          .withDescription("The server did not become available in time: " + error.getStatus().getDescription())
          .withCause(error)
          .asRuntimeException();
    }
    drops += isNew ? 1 : 0;
    return Duration.ofNanos((long) (seconds * 1e9));
  }

  private static boolean isConnectionFailure(Throwable error) {
    for (var cause = error; cause != null; cause = cause.getCause()) {
      if (cause instanceof ConnectException || cause instanceof UnknownHostException) {
        return true;
      }
    }
    return false;
  }
}
