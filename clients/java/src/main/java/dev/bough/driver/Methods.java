package dev.bough.driver;

import com.google.protobuf.Message;
import dev.bough.v1.AccessServiceGrpc;
import dev.bough.v1.AgentServiceGrpc;
import dev.bough.v1.CatalogServiceGrpc;
import dev.bough.v1.EvalServiceGrpc;
import dev.bough.v1.SessionServiceGrpc;
import dev.bough.v1.UsageServiceGrpc;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.PrototypeMarshaller;
import io.grpc.ServiceDescriptor;
import java.util.List;

/** A method of the schema, by its name. */
record Methods(MethodDescriptor<Message, Message> descriptor) {
  private static final List<ServiceDescriptor> SERVICES =
      List.of(
          AccessServiceGrpc.getServiceDescriptor(),
          AgentServiceGrpc.getServiceDescriptor(),
          CatalogServiceGrpc.getServiceDescriptor(),
          EvalServiceGrpc.getServiceDescriptor(),
          SessionServiceGrpc.getServiceDescriptor(),
          UsageServiceGrpc.getServiceDescriptor());

  /** Finds a method by a name such as {@code AgentService.Run}. */
  @SuppressWarnings("unchecked")
  static Methods of(String name) {
    var wanted = "bough.v1." + name.replace('.', '/');
    return SERVICES.stream()
        .flatMap(service -> service.getMethods().stream())
        .filter(method -> method.getFullMethodName().equals(wanted))
        .map(method -> new Methods((MethodDescriptor<Message, Message>) method))
        .findFirst()
        .orElseThrow(() -> new NotUnderstood("there is no method " + name));
  }

  /** Finds a message by its full name. */
  static Message message(String name) {
    var simple = name.startsWith("bough.v1.") ? name.substring("bough.v1.".length()).replace('.', '$') : "";
    try {
      return (Message) Class.forName("dev.bough.v1." + simple).getMethod("getDefaultInstance").invoke(null);
    } catch (ReflectiveOperationException error) {
      throw new NotUnderstood("there is no message " + name);
    }
  }

  boolean isStreaming() {
    return descriptor.getType() == MethodDescriptor.MethodType.SERVER_STREAMING;
  }

  Message.Builder newRequest() {
    var marshaller = (PrototypeMarshaller<Message>) descriptor.getRequestMarshaller();
    return marshaller.getMessagePrototype().newBuilderForType();
  }
}
