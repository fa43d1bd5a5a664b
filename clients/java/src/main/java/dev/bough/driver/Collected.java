package dev.bough.driver;

import com.google.gson.JsonObject;
import dev.bough.v1.AgentEvent;
import dev.bough.v1.ExecutionState;
import dev.bough.v1.Message;
import dev.bough.v1.Part;
import java.util.stream.Collectors;

/** What a stream of a run comes to: its answer and its state. */
final class Collected {
  private String runId = "";
  private String text = "";
  private ExecutionState state = ExecutionState.EXECUTION_STATE_RUNNING;

  void take(AgentEvent event) {
    runId = event.getRunId();
    switch (event.getPayloadCase()) {
      case RUN_COMPLETED -> {
        state = ExecutionState.EXECUTION_STATE_SUCCEEDED;
        text = textOf(event.getRunCompleted().getFinalAnswer());
      }
      case RUN_FAILED -> state = ExecutionState.EXECUTION_STATE_FAILED;
      case RUN_CANCELLED -> state = ExecutionState.EXECUTION_STATE_CANCELLED;
      case RUN_INTERRUPTED -> state = ExecutionState.EXECUTION_STATE_INPUT_REQUIRED;
      case RUN_RESUMED -> state = ExecutionState.EXECUTION_STATE_RUNNING;
      default -> {}
    }
  }

  JsonObject answer(long throughSequence) {
    var answer = new JsonObject();
    answer.addProperty("text", text);
    answer.addProperty("state", state.name());
    answer.addProperty("interrupted", state == ExecutionState.EXECUTION_STATE_INPUT_REQUIRED);
    answer.addProperty("runId", runId);
    answer.addProperty("throughSequence", throughSequence);
    return answer;
  }

  private static String textOf(Message message) {
    return message.getPartsList().stream().map(Part::getText).collect(Collectors.joining());
  }
}
