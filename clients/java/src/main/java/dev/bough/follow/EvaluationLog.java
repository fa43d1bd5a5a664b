package dev.bough.follow;

import dev.bough.v1.EvalServiceGrpc;
import dev.bough.v1.EvaluateRequest;
import dev.bough.v1.EvaluationEvent;
import dev.bough.v1.EvaluationEventBatch;
import dev.bough.v1.WatchEvaluationRequest;
import dev.bough.v1.WatchUntil;
import io.grpc.Channel;
import io.grpc.Deadline;
import java.util.Iterator;

/** The log of an evaluation, which ends with one of three events. */
final class EvaluationLog implements Log<EvaluationEvent> {
  private final EvaluateRequest request;
  private final WatchEvaluationRequest watch;
  private String evaluationId = "";
  private long received;
  private boolean isOver;
  private EvaluationEvent last;

  EvaluationLog(EvaluateRequest evaluate) {
    request = evaluate.getRequestId().isEmpty() ? evaluate.toBuilder().setRequestId(RunLog.newId()).build() : evaluate;
    watch = WatchEvaluationRequest.newBuilder().setFollow(evaluate.getFollow()).build();
  }

  EvaluationLog(WatchEvaluationRequest watch) {
    request = null;
    this.watch = watch;
    evaluationId = watch.getEvaluationId();
    received = watch.getAfterSequence();
  }

  @Override
  public Iterator<Page<EvaluationEvent>> open(Channel channel, Deadline deadline) {
    var stub = EvalServiceGrpc.newBlockingStub(channel).withDeadline(deadline);
    if (evaluationId.isEmpty()) {
      return new Pages<>(stub.evaluate(request), response -> page(response.getBatch()));
    }
    var watching = watch.toBuilder().setEvaluationId(evaluationId).setAfterSequence(received).build();
    return new Pages<>(stub.watchEvaluation(watching), response -> page(response.getBatch()));
  }

  private static Page<EvaluationEvent> page(EvaluationEventBatch batch) {
    return new Page<>(batch.getEventsList(), batch.getThroughSequence());
  }

  @Override
  public void accepted(String id) {
    evaluationId = id;
  }

  @Override
  public void received(long sequence) {
    received = Math.max(received, sequence);
  }

  @Override
  public void took(EvaluationEvent event) {
    last = event;
    evaluationId = event.getEvaluationId();
    isOver =
        switch (event.getPayloadCase()) {
          case EVALUATION_COMPLETED, EVALUATION_FAILED, EVALUATION_CANCELLED -> true;
          default -> false;
        };
  }

  @Override
  public long sequence(EvaluationEvent event) {
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
    // An evaluation that had ended has no further event, and an end that this version does not know is an end.
    return isOver
        || watch.getFollow().getUntil() == WatchUntil.WATCH_UNTIL_CURRENT
        || (last == null ? request == null : last.getPayloadCase() == EvaluationEvent.PayloadCase.PAYLOAD_NOT_SET);
  }

  @Override
  public String idKey() {
    return "bough-evaluation-id";
  }
}
