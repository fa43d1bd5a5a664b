package dev.bough.example;

import dev.bough.follow.Channels;
import dev.bough.follow.ErrorDetails;
import dev.bough.follow.EventStream;
import dev.bough.follow.Following;
import dev.bough.follow.Tree;
import dev.bough.v1.AgentEvent;
import dev.bough.v1.ApprovalDecision;
import dev.bough.v1.EvalServiceGrpc;
import dev.bough.v1.GetInvocationRequest;
import dev.bough.v1.InputAnswer;
import dev.bough.v1.InputRequest;
import dev.bough.v1.Message;
import dev.bough.v1.Part;
import dev.bough.v1.ResumeRunRequest;
import dev.bough.v1.RunPolicy;
import dev.bough.v1.RunRequest;
import dev.bough.v1.ToolOutcome;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.List;

/**
 * Runs an agent, prints what happens as it happens, asks in the terminal for what the run asks for, and prints the final tree. It
 * survives a restart of the server.
 *
 * <p>Usage: FollowRun HOST:PORT AGENT TEXT. The exit code is 0 if the run succeeded, 1 if it did not, 2 if a call failed.
 */
public final class FollowRun {
  private final ManagedChannel channel;
  private final BufferedReader terminal =
      new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
  private String runId = "";
  private List<InputRequest> open = List.of();
  private boolean isSucceeded;

  private FollowRun(ManagedChannel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) {
    if (arguments.length != 3) {
      System.err.println("usage: FollowRun HOST:PORT AGENT TEXT");
      System.exit(2);
    }
    var channel = Channels.plaintext(arguments[0]);
    int code;
    try {
      code = new FollowRun(channel).run(arguments[1], arguments[2]) ? 0 : 1;
    } catch (StatusRuntimeException error) {
      var status = error.getStatus();
      System.err.printf("%s %s: %s%n", status.getCode(), ErrorDetails.of(error).reason(), status.getDescription());
      code = 2;
    } finally {
      channel.shutdownNow();
    }
    System.exit(code);
  }

  private boolean run(String agent, String text) {
    var background = RunPolicy.newBuilder().setBackground(true); // the run has no deadline, and outlives this program
    var request = RunRequest.newBuilder().setAgent(agent).setInput(message(text)).setPolicy(background).build();
    follow(EventStream.run(Following.over(channel), request));
    while (!open.isEmpty()) {
      var answers = ResumeRunRequest.newBuilder().setRunId(runId);
      open.forEach(asked -> answers.addAnswers(answer(asked)));
      open = List.of();
      follow(EventStream.resume(Following.over(channel), answers.build()));
    }
    printTree();
    return isSucceeded;
  }

  private void follow(EventStream<AgentEvent> events) {
    try (events) {
      events.forEachRemaining(this::show);
    }
    if (events.drops() > 0) {
      System.out.printf("(the connection was lost %d times)%n", events.drops());
    }
  }

  private void show(AgentEvent event) {
    runId = event.getRunId();
    var words =
        switch (event.getPayloadCase()) {
          case SUB_AGENT_STARTED -> "starts";
          case LLM_OUTPUT_TEXT_DELTA -> event.getLlmOutputTextDelta().getText();
          case TOOL_STARTED -> "calls " + event.getToolStarted().getCall().getName();
          case INPUT_REQUESTED -> "waits: " + event.getInputRequested().getRequest().getPrompt();
          case PAYLOAD_NOT_SET -> "something that this program does not know";
          default -> event.getPayloadCase().name().toLowerCase();
        };
    System.out.printf("%4d %s: %s%n", event.getSequence(), event.getBranch(), words.strip());
    switch (event.getPayloadCase()) {
      case RUN_INTERRUPTED -> open = event.getRunInterrupted().getRequestsList();
      case RUN_COMPLETED -> isSucceeded = true;
      default -> {}
    }
  }

  private InputAnswer answer(InputRequest asked) {
    var answer = InputAnswer.newBuilder().setInputId(asked.getInputId());
    return switch (asked.getKind()) {
      case INPUT_KIND_APPROVAL, INPUT_KIND_RECOVERY ->
          answer.setApproval(ApprovalDecision.newBuilder().setApproved(read(asked, "y/n").startsWith("y"))).build();
      case INPUT_KIND_CLIENT_TOOL ->
          answer.setToolOutcome(ToolOutcome.newBuilder().addParts(part(read(asked, "result")))).build();
      default -> answer.setValueJson(read(asked, "JSON")).build();
    };
  }

  private String read(InputRequest asked, String form) {
    System.out.printf("%s: %s [%s] ", String.join(" > ", asked.getAgentPathList()), asked.getPrompt(), form);
    try {
      var line = terminal.readLine();
      return line == null ? "" : line.strip();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  private void printTree() {
    var request = GetInvocationRequest.newBuilder().setRunId(runId).build();
    var tree = EvalServiceGrpc.newBlockingStub(channel).getInvocation(request).getInvocation();
    for (var node : Tree.walk(tree)) {
      var agent = node.invocation();
      var state = agent.getState().name().replace("EXECUTION_STATE_", "");
      System.out.printf("%s%s %s%n", "  ".repeat(agent.getDepth()), agent.getName(), state);
    }
  }

  private static Message message(String text) {
    return Message.newBuilder().addParts(part(text)).build();
  }

  private static Part part(String text) {
    return Part.newBuilder().setText(text).build();
  }
}
