package dev.bough.follow;

import java.util.List;

/**
 * A response of a stream.
 *
 * @param events the next events in order; none in a heartbeat
 * @param throughSequence the sequence up to which the stream has considered the log
 */
public record Page<E>(List<E> events, long throughSequence) {}
