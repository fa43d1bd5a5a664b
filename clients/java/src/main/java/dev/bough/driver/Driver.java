package dev.bough.driver;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.MessageOrBuilder;
import com.google.protobuf.util.JsonFormat;
import dev.bough.follow.Channels;
import dev.bough.follow.ErrorDetails;
import dev.bough.follow.EventStream;
import dev.bough.follow.Following;
import dev.bough.follow.Tree;
import dev.bough.v1.AgentEvent;
import dev.bough.v1.EvalServiceGrpc;
import dev.bough.v1.EvaluateRequest;
import dev.bough.v1.ForkRunRequest;
import dev.bough.v1.GetInvocationRequest;
import dev.bough.v1.ResumeRunRequest;
import dev.bough.v1.RunRequest;
import dev.bough.v1.WatchEvaluationRequest;
import dev.bough.v1.WatchRunRequest;
import io.grpc.CallOptions;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.ClientCalls;
import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Base64;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** Performs the scenarios of tests/contract/README.md: JSON lines in, JSON lines out. Usage: Driver HOST:PORT. */
public final class Driver {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
  private static final Gson GSON = new Gson();
  private static final JsonFormat.Printer PRINTER = JsonFormat.printer().omittingInsignificantWhitespace();

  private final ManagedChannel channel;
  private int rejoins;

  private Driver(ManagedChannel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) throws IOException {
    var channel = open(arguments[0]);
    var driver = new Driver(channel);
    var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (var line = lines.readLine(); line != null; line = lines.readLine()) {
      try {
        driver.perform(JsonParser.parseString(line).getAsJsonObject());
      } catch (NotUnderstood | IllegalStateException | JsonParseException | InvalidProtocolBufferException error) {
        System.err.println("This line is not understood: " + error + ": " + line);
        System.exit(2);
      }
    }
    channel.shutdownNow();
    System.exit(0);
  }

  /** Opens the channel of all calls, with what the environment says of TLS and of a token. */
  private static ManagedChannel open(String address) throws IOException {
    var authorities = System.getenv("DRIVER_CA_FILE");
    var token = token();
    if (authorities == null) {
      return token == null ? Channels.plaintext(address) : Channels.plaintext(address, token);
    }
    var tls = TlsChannelCredentials.newBuilder().trustManager(new File(authorities));
    if (System.getenv("DRIVER_CERT_FILE") != null) {
      tls.keyManager(new File(System.getenv("DRIVER_CERT_FILE")), new File(System.getenv("DRIVER_KEY_FILE")));
    }
    return token == null ? Channels.secure(address, tls.build()) : Channels.secure(address, tls.build(), token);
  }

  /** Returns the token of the environment, or what reads the present one from a file; null without one. */
  private static Supplier<String> token() {
    var file = System.getenv("DRIVER_TOKEN_FILE");
    if (file == null) {
      var fixed = System.getenv("DRIVER_TOKEN");
      return fixed == null ? null : () -> fixed;
    }
    return () -> {
      try {
        return Files.readString(Path.of(file));
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    };
  }

  private void perform(JsonObject line) throws InvalidProtocolBufferException {
    if (line.has("transcode")) {
      print("transcoded", transcoded(line));
      return;
    }
    rejoins = 0;
    var end = new JsonObject();
    try {
      end.addProperty("code", line.has("tree") ? tree(line.get("tree").getAsString()) : call(line));
    } catch (StatusRuntimeException error) {
      end = failure(error);
    }
    end.addProperty("rejoins", rejoins);
    print("end", end);
  }

  /** Performs a call, and returns the code of its end. */
  private String call(JsonObject line) throws InvalidProtocolBufferException {
    var method = Methods.of(text(line, "call"));
    var sent = line.has("request") ? line.get("request") : new JsonObject();
    var request = parsed(sent, method.newRequest());
    var timeout = line.has("timeoutSeconds") ? line.get("timeoutSeconds").getAsDouble() : 86_400;
    if (!method.isStreaming()) {
      var options = CallOptions.DEFAULT.withDeadlineAfter((long) (timeout * 1e9), TimeUnit.NANOSECONDS);
      print("answer", json(ClientCalls.blockingUnaryCall(channel, method.descriptor(), options, request)));
      return "OK";
    }
    var isRejoining = !line.has("rejoin") || line.get("rejoin").getAsBoolean();
    var following = new Following(channel, Duration.ofNanos((long) (timeout * 1e9)), isRejoining);
    try (var events = stream(following, request)) {
      return line.has("collect") && line.get("collect").getAsBoolean()
          ? collect(events)
          : printEvents(events, line.has("cancelAfterEvents") ? line.get("cancelAfterEvents").getAsInt() : -1);
    }
  }

  private static EventStream<? extends Message> stream(Following options, Message request) {
    if (request instanceof RunRequest run) {
      return EventStream.run(options, run);
    }
    if (request instanceof WatchRunRequest watch) {
      return EventStream.watch(options, watch);
    }
    if (request instanceof ResumeRunRequest resume) {
      return EventStream.resume(options, resume);
    }
    if (request instanceof ForkRunRequest fork) {
      return EventStream.fork(options, fork);
    }
    if (request instanceof EvaluateRequest evaluate) {
      return EventStream.evaluate(options, evaluate);
    }
    return EventStream.watch(options, (WatchEvaluationRequest) request);
  }

  private String printEvents(EventStream<? extends Message> events, int most) throws InvalidProtocolBufferException {
    try {
      for (int count = 0; count != most; count++) {
        if (!events.hasNext()) {
          return "OK";
        }
        print("event", json(events.next()));
      }
      return "CANCELLED";
    } finally {
      rejoins = events.drops();
    }
  }

  private String collect(EventStream<? extends Message> events) {
    var collected = new Collected();
    try {
      events.forEachRemaining(event -> collected.take((AgentEvent) event));
    } finally {
      rejoins = events.drops();
    }
    print("answer", collected.answer(events.throughSequence()));
    return "OK";
  }

  private String tree(String runId) {
    var request = GetInvocationRequest.newBuilder().setRunId(runId).build();
    var agents = new JsonArray();
    for (var node : Tree.walk(EvalServiceGrpc.newBlockingStub(channel).getInvocation(request).getInvocation())) {
      var agent = new JsonObject();
      agent.addProperty("agent", node.invocation().getName());
      agent.addProperty("path", node.path());
      agent.addProperty("depth", node.invocation().getDepth());
      agent.addProperty("state", node.invocation().getState().name());
      agents.add(agent);
    }
    var answer = new JsonObject();
    answer.add("agents", agents);
    print("answer", answer);
    return "OK";
  }

  private static JsonObject failure(StatusRuntimeException error) {
    var details = ErrorDetails.of(error);
    var end = new JsonObject();
    end.addProperty("code", error.getStatus().getCode().name());
    end.addProperty("message", error.getStatus().getDescription());
    end.addProperty("reason", details.reason());
    end.add("metadata", GSON.toJsonTree(details.metadata()));
    var violations = new JsonArray();
    for (var each : details.violations()) {
      var violation = new JsonObject();
      violation.addProperty("field", each.getField());
      violation.addProperty("description", each.getDescription());
      violations.add(violation);
    }
    end.add("violations", violations);
    return end;
  }

  private static JsonObject transcoded(JsonObject line) throws InvalidProtocolBufferException {
    var prototype = Methods.message(text(line, "transcode"));
    Message message;
    if (line.has("binary")) {
      var data = ByteString.copyFrom(Base64.getDecoder().decode(text(line, "binary")));
      message = prototype.getParserForType().parseFrom(data);
    } else {
      message = parsed(line.get("json"), prototype.newBuilderForType());
    }
    var answer = new JsonObject();
    answer.addProperty("binary", Base64.getEncoder().encodeToString(message.toByteArray()));
    answer.add("json", json(message));
    return answer;
  }

  private static Message parsed(JsonElement json, Message.Builder into) throws InvalidProtocolBufferException {
    JsonFormat.parser().merge(GSON.toJson(json), into);
    return into.build();
  }

  private static JsonElement json(MessageOrBuilder message) throws InvalidProtocolBufferException {
    return JsonParser.parseString(PRINTER.print(message));
  }

  private static String text(JsonObject line, String name) {
    if (!line.has(name)) {
      throw new NotUnderstood("there is no " + name);
    }
    return line.get(name).getAsString();
  }

  private static void print(String name, JsonElement what) {
    var line = new JsonObject();
    line.add(name, what);
    OUT.println(GSON.toJson(line));
  }
}
