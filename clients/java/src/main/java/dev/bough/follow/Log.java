package dev.bough.follow;

import io.grpc.Channel;
import io.grpc.Deadline;
import java.util.Iterator;

/** A log that a stream follows: the call that continues it, and what is known of its end. One thread uses it. */
interface Log<E> {
  /** Begins the call that continues after the last sequence. */
  Iterator<Page<E>> open(Channel channel, Deadline deadline);

  /** Notes the id that the server sends before the first event. */
  void accepted(String id);

  /** Notes an event or a heartbeat; {@code sequence} is the last one received. */
  void received(long sequence);

  /** Notes an event that is new. */
  void took(E event);

  /** Returns the sequence of an event. */
  long sequence(E event);

  /** Returns the last sequence received. */
  long received();

  /** Returns whether the last event ends the stream. */
  boolean isOver();

  /** Returns whether a stream may end with OK here, without the event that ends it. */
  boolean mayEnd();

  /** Returns the initial metadata that has the id. */
  String idKey();
}
