package dev.bough.follow;

import dev.bough.v1.AgentEvent;
import dev.bough.v1.EvaluateRequest;
import dev.bough.v1.EvaluationEvent;
import dev.bough.v1.ForkRunRequest;
import dev.bough.v1.ResumeRunRequest;
import dev.bough.v1.RunRequest;
import dev.bough.v1.WatchEvaluationRequest;
import dev.bough.v1.WatchRunRequest;
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Queue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/**
 * The events of a run or of an evaluation, every sequence once, in order, over drops and restarts of the server.
 *
 * <p>The call is made when the first event is asked for. If the connection breaks, the stream continues by the last {@code
 * through_sequence}; a call that was not answered is repeated under its request id, so that nothing starts twice. An error that
 * ends the stream is thrown as a {@link StatusRuntimeException}; {@link ErrorDetails} reads it. A call that ends with OK after an
 * event of a kind that this version does not know ends the stream too, such as a pause of a later version: the run has not ended
 * then. Closing a stream ends the call, not the run. Nothing is kept but one response.
 */
public final class EventStream<E> implements Iterator<E>, AutoCloseable {
  private final ManagedChannel channel;
  private final Log<E> log;
  private final Deadline deadline;
  private final Backoff backoff;
  private final boolean rejoins;
  private final Queue<E> ready = new ArrayDeque<>();
  private final AtomicReference<Metadata> headers = new AtomicReference<>();
  private Context.CancellableContext call;
  private Iterator<Page<E>> pages;
  private boolean isEnded;

  private EventStream(ManagedChannel channel, Log<E> log, Duration timeout, boolean rejoins) {
    this.channel = channel;
    this.log = log;
    this.rejoins = rejoins;
    deadline = Deadline.after(timeout.toNanos(), TimeUnit.NANOSECONDS);
    backoff = new Backoff(deadline);
  }

  /** Starts a run and follows it to its end, or to its first interruption. The timeout bounds the stream in all. */
  public static EventStream<AgentEvent> run(Following options, RunRequest request) {
    return of(options, new RunLog(request));
  }

  /** Starts a run that shares the beginning of another one's log, and follows it. */
  public static EventStream<AgentEvent> fork(Following options, ForkRunRequest request) {
    return of(options, new RunLog(request));
  }

  /** Answers what a run asks for, and follows it to its end or its next interruption. */
  public static EventStream<AgentEvent> resume(Following options, ResumeRunRequest request) {
    return of(options, new RunLog(request));
  }

  /** Follows a run from any sequence. */
  public static EventStream<AgentEvent> watch(Following options, WatchRunRequest request) {
    return of(options, new RunLog(request));
  }

  /** Starts an evaluation and follows it to its end. */
  public static EventStream<EvaluationEvent> evaluate(Following options, EvaluateRequest request) {
    return of(options, new EvaluationLog(request));
  }

  /** Follows an evaluation from any sequence. */
  public static EventStream<EvaluationEvent> watch(Following options, WatchEvaluationRequest request) {
    return of(options, new EvaluationLog(request));
  }

  private static <E> EventStream<E> of(Following options, Log<E> log) {
    return new EventStream<>(options.channel(), log, options.timeout(), options.rejoins());
  }

  /** Returns how often the stream has lost its server. */
  public int drops() {
    return backoff.drops();
  }

  /** Returns the sequence up to which the caller has every event. */
  public long throughSequence() {
    return ready.isEmpty() ? log.received() : log.sequence(ready.element()) - 1;
  }

  @Override
  public boolean hasNext() {
    while (ready.isEmpty() && !isEnded) {
      read();
    }
    return !ready.isEmpty();
  }

  @Override
  public E next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    return ready.remove();
  }

  @Override
  public void close() {
    isEnded = true;
    ready.clear();
    drop();
  }

  private void read() {
    try {
      if (pages == null) {
        open();
      }
      if (pages.hasNext()) {
        noteHeaders();
        take(pages.next());
        return;
      }
      noteHeaders();
      if (!log.mayEnd()) {
        throw Status.UNAVAILABLE.withDescription("The stream ended before its last event.").asRuntimeException();
      }
      isEnded = true;
      drop();
    } catch (StatusRuntimeException error) {
      noteHeaders();
      drop();
      recover(isCancelledByServer(error) ? stopped(error) : error);
    }
  }

  private void open() {
    channel.resetConnectBackoff(); // or a channel that has lost its server waits for up to two minutes
    headers.set(null);
    call = Context.current().withCancellation();
    var capturing =
        ClientInterceptors.intercept(
            channel, MetadataUtils.newCaptureMetadataInterceptor(headers, new AtomicReference<>()));
    var previous = call.attach();
    try {
      pages = log.open(capturing, deadline);
    } finally {
      call.detach(previous);
    }
  }

  private void noteHeaders() {
    var sent = headers.getAndSet(null);
    var id = sent == null ? null : sent.get(Metadata.Key.of(log.idKey(), Metadata.ASCII_STRING_MARSHALLER));
    if (id != null) {
      log.accepted(id);
      backoff.answered();
    }
  }

  private void take(Page<E> page) {
    backoff.progressed();
    for (var event : page.events()) {
      if (log.sequence(event) > log.received()) {
        log.received(log.sequence(event));
        log.took(event);
        ready.add(event);
      }
    }
    log.received(page.throughSequence());
  }

  /** Returns whether gRPC has ended a call, with this text, that a stopping server had not accepted. */
  private static boolean isCancelledByServer(StatusRuntimeException error) {
    var status = error.getStatus();
    return status.getCode() == Status.Code.CANCELLED && "CANCELLED".equals(status.getDescription());
  }

  private static StatusRuntimeException stopped(StatusRuntimeException error) {
    return Status.UNAVAILABLE
        .withDescription("The server stopped before it accepted the call.")
        .withCause(error)
        .asRuntimeException();
  }

  private void recover(StatusRuntimeException error) {
    if (log.isOver()) {
      isEnded = true; // an error after the last event changes nothing
      return;
    }
    try {
      if (!rejoins) {
        throw error;
      }
      Thread.sleep(backoff.delayAfter(error).toMillis());
    } catch (StatusRuntimeException last) {
      isEnded = true;
      throw last;
    } catch (InterruptedException interrupted) {
      isEnded = true;
      Thread.currentThread().interrupt();
      throw Status.CANCELLED.withCause(interrupted).asRuntimeException();
    }
  }

  private void drop() {
    if (call != null) {
      call.cancel(null);
    }
    call = null;
    pages = null;
  }
}
