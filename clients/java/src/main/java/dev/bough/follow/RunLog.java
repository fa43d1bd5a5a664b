package dev.bough.follow;

import com.google.protobuf.Message;
import dev.bough.v1.AgentEvent;
import dev.bough.v1.AgentServiceGrpc;
import dev.bough.v1.EventBatch;
import dev.bough.v1.FollowOptions;
import dev.bough.v1.ForkRunRequest;
import dev.bough.v1.InputAnswer;
import dev.bough.v1.InputRequest;
import dev.bough.v1.ResumeRunRequest;
import dev.bough.v1.RunRequest;
import dev.bough.v1.WatchRunRequest;
import dev.bough.v1.WatchUntil;
import io.grpc.Channel;
import io.grpc.Deadline;
import java.util.HashSet;
import java.util.Iterator;
import java.util.Set;
import java.util.UUID;
import java.util.function.Function;
import java.util.stream.Collectors;

/** The log of a run. The first call is repeated under its request id until the position is known; then the run is watched. */
final class RunLog implements Log<AgentEvent> {
  private final Message request;
  private final FollowOptions follow;
  private String runId = "";
  private long received;
  private boolean isOver;
  private AgentEvent last;

  /** The answers of a ResumeRun that may not have been received yet, and the requests that an interruption has named. */
  private final Set<String> unanswered = new HashSet<>();

  private final Set<String> asked = new HashSet<>();
  private long interruption;

  RunLog(RunRequest run) {
    request = run.getRequestId().isEmpty() ? run.toBuilder().setRequestId(newId()).build() : run;
    follow = run.getFollow();
  }

  RunLog(ForkRunRequest fork) {
    request = fork.getRequestId().isEmpty() ? fork.toBuilder().setRequestId(newId()).build() : fork;
    follow = fork.getFollow();
  }

  RunLog(ResumeRunRequest resume) {
    request = resume.getRequestId().isEmpty() ? resume.toBuilder().setRequestId(newId()).build() : resume;
    follow = resume.getFollow();
    runId = resume.getRunId();
    received = resume.getAfterSequence();
    resume.getAnswersList().stream().map(InputAnswer::getInputId).forEach(unanswered::add);
  }

  RunLog(WatchRunRequest watch) {
    request = watch;
    follow = watch.getFollow();
    runId = watch.getRunId();
    received = watch.getAfterSequence();
  }

  static String newId() {
    return UUID.randomUUID().toString();
  }

  String runId() {
    return runId;
  }

  @Override
  public Iterator<Page<AgentEvent>> open(Channel channel, Deadline deadline) {
    var stub = AgentServiceGrpc.newBlockingStub(channel).withDeadline(deadline);
    if (request instanceof RunRequest run && runId.isEmpty()) {
      return pages(stub.run(run), response -> response.getBatch());
    }
    if (request instanceof ForkRunRequest fork && received == 0) {
      return pages(stub.forkRun(fork), response -> response.getBatch());
    }
    if (request instanceof ResumeRunRequest resume && !unanswered.isEmpty()) {
      return pages(stub.resumeRun(again(resume)), response -> response.getBatch());
    }
    return pages(stub.watchRun(watching()), response -> response.getBatch());
  }

  /**
   * Returns the answers once more. The run cannot be watched instead: only the server knows which interruption is the first after
   * them. An interruption that was the last event may be that one, so it is asked for again.
   */
  private ResumeRunRequest again(ResumeRunRequest resume) {
    if (!resume.hasAfterSequence()) {
      return resume;
    }
    return resume.toBuilder().setAfterSequence(received == interruption ? Math.max(0, received - 1) : received).build();
  }

  private WatchRunRequest watching() {
    if (request instanceof WatchRunRequest watch) {
      return watch.toBuilder().setAfterSequence(received).build();
    }
    return WatchRunRequest.newBuilder()
        .setRunId(runId)
        .setAfterSequence(received)
        .setUntil(WatchUntil.WATCH_UNTIL_INTERRUPTED)
        .setFollow(follow)
        .build();
  }

  private static <R> Iterator<Page<AgentEvent>> pages(Iterator<R> responses, Function<R, EventBatch> batch) {
    return new Pages<>(responses, response -> {
      var each = batch.apply(response);
      return new Page<>(each.getEventsList(), each.getThroughSequence());
    });
  }

  @Override
  public void accepted(String id) {
    runId = id;
  }

  @Override
  public void received(long sequence) {
    received = Math.max(received, sequence);
    if (sequence > 0 && request instanceof ResumeRunRequest resume && !resume.hasAfterSequence()) {
      unanswered.clear(); // such a stream begins behind the answers
    }
  }

  @Override
  public void took(AgentEvent event) {
    last = event;
    runId = event.getRunId();
    isOver = ends(event);
  }

  private boolean ends(AgentEvent event) {
    switch (event.getPayloadCase()) {
      case RUN_COMPLETED, RUN_FAILED, RUN_CANCELLED:
        return true;
      case INPUT_RECEIVED:
        unanswered.remove(event.getInputReceived().getAnswer().getInputId());
        return false;
      case RUN_INTERRUPTED:
        return request instanceof WatchRunRequest watch
            ? watch.getUntil() == WatchUntil.WATCH_UNTIL_INTERRUPTED
            : isInterruptedAfterAnswers(event);
      default:
        return false;
    }
  }

  /** A request that an earlier interruption named, and this one does not, has been answered. */
  private boolean isInterruptedAfterAnswers(AgentEvent event) {
    var named =
        event.getRunInterrupted().getRequestsList().stream().map(InputRequest::getInputId).collect(Collectors.toSet());
    unanswered.removeIf(id -> asked.contains(id) && !named.contains(id));
    asked.addAll(named);
    interruption = event.getSequence();
    return unanswered.isEmpty();
  }

  @Override
  public long sequence(AgentEvent event) {
    return event.getSequence();
  }

  @Override
  public long received() {
    return received;
  }

  @Override
  public boolean isOver() {
    return isOver;
  }

  @Override
  public boolean mayEnd() {
    if (request instanceof WatchRunRequest watch && watch.getUntil() == WatchUntil.WATCH_UNTIL_CURRENT) {
      return true;
    }
    if (last == null) {
      // A run that had ended has no further event, and a mask can hide that answers were received.
      return request instanceof WatchRunRequest || request instanceof ResumeRunRequest;
    }
    // A later version may end streams at events that are not known yet, such as a pause. The server knows best which interruption
    // follows the answers.
    var isInterruption = request instanceof ResumeRunRequest && last.hasRunInterrupted();
    return isOver || isInterruption || last.getPayloadCase() == AgentEvent.PayloadCase.PAYLOAD_NOT_SET;
  }

  @Override
  public String idKey() {
    return "bough-run-id";
  }
}
